"""The commands `mtp-train <stage> [overrides]` and `mtp-train <tool> [arguments]`.

A user's mistake is one line and exit status 2, without a traceback.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from mtp_train.core.dist import leave
from mtp_train.core.errors import UserError, did_you_mean

STAGES = ("regenerate", "precompute", "train", "evaluate", "report", "export")
PLAN = "plan"  # a look ahead: no part of a run
TOOLS = ("clean", "inspect", "store")  # with arguments of their own, and without a run
COMPARE = ["report", "compare"]  # a look at several runs
IMPORT = "import"  # in place of `train`
LIST = "--list"  # of `export`
SWEEP = ("-m", "--multirun")  # Hydra's own flags
USAGE = f"""usage: mtp-train STAGE [recipe=NAME] [key=value ...]
       mtp-train train -m [recipe=NAME] [key=value,value ...]
       mtp-train report compare RUN RUN [RUN ...] [--out FOLDER]
       mtp-train import FOLDER [key=value ...]
       mtp-train TOOL [arguments]         (mtp-train TOOL --help tells them)

stages: {", ".join(STAGES)}
        plan           disk, memory and hours of the configuration, before anything is loaded
        run            all of them, in this order; what is done already is not done again
        import FOLDER  a head in a serving layout becomes the run's trained head
        export --list  which layouts hold the head, and why another does not
        train -m, evaluate -m    a sweep: a job for each choice of values, and a table of them all
tools:  inspect        what a data set trains: its masks in colour, lengths, duplicates, refused rows
        clean          what lies in a run folder, with sizes; removes what is asked for
        store          look into a feature store: verify, stat or sample

keys:   see conf/ (target.path, run, train.epochs, ...); `run` names the folder in which stages find each other
"""


def main() -> int:
    arguments = sys.argv[1:]
    asked = {"-h", "--help", "help"} & set(arguments)
    own_help = arguments[:1] and (arguments[0] in TOOLS or arguments[:2] == COMPARE)
    if not arguments or (asked and not own_help):
        print(USAGE)
        return 0 if arguments else 2
    return guarded(lambda: dispatch(arguments[0], arguments[1:]))


def dispatch(name: str, overrides: list[str]) -> None:
    """Run one stage, or all, or a tool."""
    if name in TOOLS:
        command(name).tool(overrides)
        return
    if [name, *overrides[:1]] == COMPARE:
        command(name).tool(overrides[1:])
        return
    if name == IMPORT:
        command("importing").run(overrides)
        return
    if name == "export" and LIST in overrides:
        command(name).show([item for item in overrides if item != LIST])
        return
    if name not in (*STAGES, "run", PLAN):
        raise UserError(
            "a stage must be one of " + ", ".join((*STAGES, "run", PLAN, IMPORT, *TOOLS)),
            name,
            did_you_mean(name, (*STAGES, "run", PLAN, IMPORT, *TOOLS), "see mtp-train --help"),
        )
    if set(SWEEP) & set(overrides):
        rest = [item for item in overrides if item not in SWEEP]
        command("sweep").sweep(name, rest)
        return
    # Stages load torch and transformers; a typing mistake should not wait for them.
    from mtp_train.cli.job import Job

    job = Job(overrides)
    if name == "run":
        _run_all(job)
    else:
        command(name).stage(job)


def _run_all(job: Any) -> None:
    from mtp_train.cli.whole_run import Timetable

    stages = _whole_run(job)
    timetable = Timetable(stages, job.config["plan"]["stage_seconds"])
    with ExitStack() as stack:
        if job.process.ranks.main:
            stack.enter_context(job.folder.held(*stages))
        for stage in stages:
            timetable.run(stage, partial(command(stage).stage, job))


def _whole_run(job: Any) -> tuple[str, ...]:
    """All stages; a head that no layout holds is not exported, which is said before the work begins."""
    from mtp_train.core.progress import say

    family = f"head.family={job.head_config.family}"
    cannot = job.layout.not_held(job.head_config) if job.layout else family
    if cannot:
        say(f"run: there will be no export, its layout can't hold {cannot}")
        return tuple(stage for stage in STAGES if stage != "export")
    return STAGES


def command(name: str) -> Any:
    """The module of a stage or tool, imported when it is asked for."""
    return importlib.import_module(f"mtp_train.cli.{name}")


def guarded(work: Callable[[], None]) -> int:
    """Run `work`; print what a user can act on as one line."""
    try:
        work()
    except UserError as error:
        print("mtp-train: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, an unreadable file
        print("mtp-train: error:", " ".join(str(_advised(error)).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mtp-train: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        leave()
    return 0


def _advised(error: OSError) -> Exception:
    """A full disk as an error that says what to do; others as they are."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return UserError(
        "the disk must have room for what a stage writes",
        error,
        "free some of it (`mtp-train clean` shows what may go) and give the same command again",
    )


if __name__ == "__main__":
    sys.exit(main())
