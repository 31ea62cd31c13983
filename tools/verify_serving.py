"""Hold our engine's acceptance against stock vLLM's own counters, layout by layout, and sampling against the target.

1. The run's exported head on its held-out prompts, greedy, in the dtype that serves. bfloat16 engines part at near-ties
   and then count along different texts, so our engine drafts along vLLM's outputs (a script of the target's choices):
   same text, same drafts wanted. Our free-running counters are printed beside them.
2. Small heads in every layout that vLLM's CPU build may serve, each trained here to know one answer and to have seen a
   few: counters as above, and nearly everything accepted on the known one, in both engines. A chain that is fed the
   wrong state, position or token anywhere accepts far less.
3. Sampling at temperature 1: the log-likelihood, under the float32 target, of what an engine says with and without
   speculation, against what the target's own samples have. Ours must pass; vLLM's known faults must be found.

    python tools/verify_serving.py --run runs/smollm2_mtp_cpu --table docs/serving.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from serving_cases import CASES, Case, small_head
from serving_figures import (
    Counters,
    Row,
    Sampled,
    Score,
    gaps,
    sampled,
    sampling_failures,
    sampling_finding,
    table,
    with_block,
)

from mtp_train import __version__
from mtp_train.attention.packed import PackedContext
from mtp_train.cli.job import Job
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json, write_json, write_text
from mtp_train.core.records import Accounting
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.lossless import first_difference
from mtp_train.export.formats import LAYOUTS
from mtp_train.export.stage import ExportConfig, export_head, import_head
from mtp_train.heads.base import DraftHead
from mtp_train.heads.families import family_of
from mtp_train.models.target import Target
from mtp_train.text.sources import Answer, read_answers

OVERFIT_ACCEPTANCE = 0.95
VLLM = "vLLM, CPU build"
OURS = "mtp_train"
SMALL_PROMPTS = 6  # that small heads are trained and served on
SAMPLED_PROMPTS = 16
ROOT = Path(__file__).resolve().parents[1]
SERVING_PYTHON = ROOT / ".venv-serving" / "bin" / "python"


@dataclass(frozen=True)
class Texts:
    """Prompts and what one engine said to them."""

    prompts: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]


@dataclass(frozen=True)
class Served:
    """One run of vLLM over one file of prompts."""

    version: str
    texts: Texts
    counters: Counters
    start_up_s: float


def main() -> int:
    args = parse_args()
    try:
        records = [recorded(args)] if args.result else Check(args).run()
    except UserError as error:
        print(f"verify-serving: error: {error}", file=sys.stderr)
        return 2
    failures = [
        f"{record['name']}: {failure}" for record in records for failure in record["failures"]
    ]
    print(
        "\n".join(f"verify-serving: FAILED: {failure}" for failure in failures)
        or "verify-serving: passed"
    )
    return 1 if failures else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--run", type=Path, default=Path("runs/smollm2_mtp_cpu"), help="a run folder with an export"
    )
    parser.add_argument("--recipe", default="smollm2_mtp_cpu")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts served")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8, help="sequences at once")
    parser.add_argument("--quick", action="store_true", help="fewer layouts, k alone")
    parser.add_argument("--cases", nargs="+", help="only these small heads, by name")
    parser.add_argument("--table", type=Path, help="write the table between this document's marks")
    parser.add_argument(
        "--result", type=Path, help="compare with this output of serve_vllm.py instead of serving"
    )
    parser.add_argument(
        "--head", type=Path, help="with --result: the exported head that was served"
    )
    return parser.parse_args()


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Any exported head against a recorded vLLM run of it."""
    if args.head is None:
        raise UserError("--result needs the head that was served", "no --head", "name its folder")
    job = Job([f"recipe={args.recipe}"])
    engine = Ours(job.target(), job.stop, args.batch, args.max_new_tokens)
    layout, head = import_head(args.head, job.target())
    served = vllm_runs(read_json(args.result))[0]
    return compared("recorded", layout.name, engine, head, args.k, [served], free=True)


class Check:
    """The whole check on one run folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.job = Job([f"recipe={args.recipe}", f"run={args.run}"])
        self.job.folder.require("export")
        self.folder: Path = args.run / "serving"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vllm = Vllm(args, self.folder, self.job.target())
        self.ours = Ours(self.job.target(), self.job.stop, args.batch, args.max_new_tokens)
        self.heads: list[tuple[Any, DraftHead]] = []

    def run(self) -> list[dict[str, Any]]:
        heldout = read_answers(self.job.folder.answers("heldout"), Accounting())
        prompts = [answer.prompt_ids for answer in heldout[: self.args.prompts]]
        plain, *sampled = self.vllm.serve(
            "plain", None, "none", {"small": prompts[:SMALL_PROMPTS]}, 0, self.sampled(prompts)
        )
        records = [] if self.args.cases else self.exported(prompts, sampled[0])
        known, others = self.answers(plain.texts)
        for case in CASES:
            wanted = self.args.cases or ([case.name] if case.quick or not self.args.quick else [])
            if case.name in wanted:
                records += self.served_case(case, known, others)
        write_json(self.folder / "comparison.json", records)
        self.write_table(records)
        return records

    def sampled(self, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return prompts[:SAMPLED_PROMPTS]

    def exported(self, prompts: list[tuple[int, ...]], plain: Served) -> list[dict[str, Any]]:
        """The run's own head, and how both engines sample with it."""
        folder, k = self.job.folder.export("mimo_mtp"), self.args.k
        head = import_head(folder, self.job.target())[1]
        greedy, drafted = self.vllm.serve(
            f"heldout-{k}", folder, "mtp", {"heldout": prompts}, k, self.sampled(prompts)
        )
        records = [compared("the run's head", "mimo_mtp", self.ours, head, k, [greedy], free=True)]
        if k != 1 and not self.args.quick:
            (one,) = self.vllm.serve("heldout-1", folder, "mtp", {"heldout": prompts}, 1)
            records.append(
                compared("the run's head", "mimo_mtp", self.ours, head, 1, [one], free=True)
            )
        score = Scorer(self.job.target("float32"))
        theirs = [sampled(score(run.texts)) for run in (plain, drafted)]
        ours = [
            sampled(score(self.ours.sample(head, self.sampled(prompts), drafts)))
            for drafts in (0, k)
        ]
        return [
            *records,
            sampling_record(VLLM, plain.version, *theirs),
            sampling_record(OURS, __version__, *ours),
        ]

    def answers(self, plain: Texts) -> tuple[Answer, list[Answer]]:
        """What small heads are trained on: the longest text that both engines wrote, which is to be known, and others.

        Where engines part at a near-tie, a head that learnt one choice misses the other's.
        """
        ours = self.ours.greedy(None, plain.prompts, 0)
        common = [first_difference(o, c.tokens) for o, c in zip(plain.outputs, ours, strict=True)]
        best = common.index(max(common))
        made = [
            Answer(f"small-{at}", "all", (), prompt, output, "length")
            for at, (prompt, output) in enumerate(zip(plain.prompts, plain.outputs, strict=True))
        ]
        known = made.pop(best)
        return replace(known, output_ids=known.output_ids[: common[best]]), made

    def served_case(
        self, case: Case, known: Answer, others: Sequence[Answer]
    ) -> list[dict[str, Any]]:
        """A small head at every k, in both engines."""
        target = self.job.target()
        head = self.head(case.head, known, others)
        folder = self.folder / case.name
        export_head(head, target, ExportConfig(case.layout), folder, {})
        served_head = import_head(folder, target)[1]
        records = []
        for k in case.drafts[:1] if self.args.quick else case.drafts:
            name = f"{case.name}-{k}"
            groups = {"known": [known.prompt_ids], "others": [one.prompt_ids for one in others]}
            # Drafts past the trained text are guesses: the known one stops k tokens before its end.
            limits = {"known": len(known.output_ids) - k}
            try:
                served = self.vllm.serve(
                    name, folder, case.method, groups, k, limits=limits, case=case
                )
            except UserError as error:
                print(f"\n{name}: {error}")
                records.append(refused(name, case, k, str(error)))
                continue
            record = compared(name, case.layout, self.ours, served_head, k, served)
            trained = served[0].texts.outputs[0] == known.output_ids[: limits["known"]]
            rates = {
                side: counters.figures()["acceptance_rate"]
                for side, counters in (
                    ("vLLM", served[0].counters),
                    (OURS, self.ours.counters(served_head, served[0].texts, k)),
                )
            }
            print(f"  the known text: accepted {rates}" + ("" if trained else ", parted from it"))
            if trained and case.head is not None:
                record["failures"] += [
                    f"the known text's drafts are accepted {rate:.1%} in {side}, {OVERFIT_ACCEPTANCE:.0%} is expected"
                    for side, rate in rates.items()
                    if rate < OVERFIT_ACCEPTANCE
                ]
            records.append(record | {"known": rates | {"trained_text": trained}})
        return records

    def head(self, config: Any, known: Answer, others: Sequence[Answer]) -> DraftHead:
        """A small head of that configuration, trained once."""
        for made, head in self.heads:
            if made == config:
                return head
        print(f"verify-serving: training a small head, {config or 'a blurred copy'}", flush=True)
        head = small_head(self.job.target(), config, known, others)
        self.heads.append((config, head))
        return head

    def write_table(self, records: list[dict[str, Any]]) -> None:
        text = table(table_rows(records))
        print(f"\n{text}\n")
        if self.args.table is not None:
            document = self.args.table.read_text(encoding="utf-8")
            write_text(self.args.table, with_block(document, text))
            write_json(self.args.table.with_suffix(".json"), records)


class Vllm:
    """Stock vLLM in its own environment, one start per call."""

    def __init__(self, args: argparse.Namespace, folder: Path, target: Target) -> None:
        if not SERVING_PYTHON.is_file():
            raise UserError(
                "vLLM must be installed in its own environment",
                SERVING_PYTHON,
                "run make verify-serving",
            )
        self.args, self.folder, self.target = args, folder, target

    def serve(
        self,
        name: str,
        head: Path | None,
        method: str,
        groups: dict[str, list[tuple[int, ...]]],
        k: int,
        sampled: list[tuple[int, ...]] | None = None,
        limits: dict[str, int] | None = None,
        case: Case | None = None,
    ) -> list[Served]:
        """Serve groups of prompts greedily, then `sampled` at temperature 1; a run each.

        limits: max_new_tokens of groups that have their own.
        """
        beside = case is None or case.beside
        target = self.target.path if beside else head
        out = self.folder / f"{name}-vllm.json"
        command = [str(SERVING_PYTHON), str(ROOT / "tools" / "serve_vllm.py")]
        command += ["--target", str(target), "--method", method, "--k", str(k), "--out", str(out)]
        command += ["--head", str(head)] if beside and head is not None else []
        command += ["--max-new-tokens", str(self.args.max_new_tokens)]
        command += ["--max-num-seqs", str(self.args.batch), "--prompts"]
        for group, prompts in groups.items():
            command.append(str(self.asked(f"{name}-{group}", prompts, (limits or {}).get(group))))
        if sampled is not None:
            command += ["--sampled", str(self.asked(f"{name}-sampled", sampled, None))]
        if self.args.cases is None or name != "plain" or not out.is_file():
            print(f"verify-serving: vLLM serves {name}", flush=True)
            self.start(command, plugin=case is not None and case.plugin)
        return vllm_runs(read_json(out))

    def asked(self, name: str, prompts: list[tuple[int, ...]], limit: int | None) -> Path:
        own = {} if limit is None else {"max_new_tokens": limit}
        lines = [json.dumps({"prompt_ids": list(prompt)} | own) + "\n" for prompt in prompts]
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        return path

    def start(self, command: list[str], plugin: bool) -> None:
        environment = dict(os.environ)
        if plugin:
            paths = [str(entry_points(self.folder / "plugin")), str(ROOT)]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=environment,
        )
        if done.returncode:
            raise UserError(
                "vLLM must serve the head", last_error(done.stdout), "see docs/serving.md"
            )


class Ours:
    """Our engine, on the same prompts and texts."""

    def __init__(
        self, target: Target, stop: frozenset[int], batch: int, max_new_tokens: int
    ) -> None:
        self.target, self.stop, self.batch = target, stop, batch
        self.max_new_tokens = max_new_tokens

    def greedy(
        self, head: DraftHead | None, prompts: Sequence[tuple[int, ...]], k: int
    ) -> list[Completion]:
        return self.run(head, self.requests(prompts), k, Sampling())

    def along(self, head: DraftHead, texts: Texts, k: int) -> list[Completion]:
        """Drafts along what another engine wrote."""
        requests = [
            replace(request, max_new_tokens=len(output), script=output)
            for request, output in zip(self.requests(texts.prompts), texts.outputs, strict=True)
        ]
        return self.run(head, requests, k, Sampling())

    def sample(self, head: DraftHead, prompts: Sequence[tuple[int, ...]], k: int) -> Texts:
        """At temperature 1, with k drafts or none."""
        drawn = Sampling(temperature=1.0, seed=k)
        done = self.run(head if k else None, self.requests(prompts), k, drawn)
        return Texts(list(prompts), [completion.tokens for completion in done])

    def counters(self, head: DraftHead, texts: Texts, k: int) -> Counters:
        return counted(self.along(head, texts, k), k)

    def requests(self, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
        return [
            Request(str(index), prompt, self.max_new_tokens, self.stop)
            for index, prompt in enumerate(prompts)
        ]

    def run(
        self, head: DraftHead | None, requests: Sequence[Request], k: int, sampling: Sampling
    ) -> list[Completion]:
        proposer = None if head is None else ChainProposer(self.target, head, k)
        engine = Engine(self.target, proposer, EngineConfig(max_batch=self.batch))
        return engine.generate(requests, sampling)


class Scorer:
    """Each output's log-likelihood and what is expected of it, by a plain forward of the float32 target."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @torch.inference_mode()
    def __call__(self, texts: Texts) -> list[Score]:
        return [self.one(*pair) for pair in zip(texts.prompts, texts.outputs, strict=True)]

    def one(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> Score:
        token_T = torch.tensor(prompt + output, device=self.target.device)
        position_T = torch.arange(len(token_T), device=self.target.device)
        state_TD = self.target.forward(token_T, position_T, PackedContext([0, len(token_T)]))
        log_LV = self.target.logits(state_TD[len(prompt) - 1 : -1]).float().log_softmax(-1)
        said_L = log_LV.gather(1, token_T[len(prompt) :].unsqueeze(1))
        p_LV = log_LV.exp()
        mean_L = (p_LV * log_LV).sum(-1)
        variance_L = (p_LV * log_LV.square()).sum(-1) - mean_L.square()
        return Score(len(output), float(said_L.sum()), float(mean_L.sum()), float(variance_L.sum()))


def compared(
    name: str,
    layout: str,
    engine: Ours,
    head: DraftHead,
    k: int,
    served: Sequence[Served],
    free: bool = False,
) -> dict[str, Any]:
    """Our counters beside vLLM's along its texts, all its runs together; with `free` ours running free too."""
    texts = Texts(
        [prompt for run in served for prompt in run.texts.prompts],
        [output for run in served for output in run.texts.outputs],
    )
    total = served[0].counters
    for run in served[1:]:
        total = total.plus(run.counters)
    theirs, ours = total.figures(), engine.counters(head, texts, k).figures()
    print(
        f"\n{name} ({layout}): {len(texts.prompts)} prompts, k = {k}, greedy, vLLM {served[0].version}"
    )
    show("vLLM", theirs)
    show("ours, along vLLM's text", ours)
    record = {
        "name": name,
        "layout": layout,
        "k": k,
        "engine": VLLM,
        "version": served[0].version,
        "start_up_s": served[0].start_up_s,
        "prompts": len(texts.prompts),
        "vllm": theirs,
        "ours": ours,
        "failures": gaps(theirs, ours),
    }
    if free:
        done = engine.greedy(head, texts.prompts, k)
        record["ours_free"] = counted(done, k).figures()
        show("ours, running free", record["ours_free"])
        same = sum(o == c.tokens for o, c in zip(texts.outputs, done, strict=True))
        print(f"  texts: {same} of {len(done)} equal; the others part at near-ties")
    return record


def refused(name: str, case: Case, k: int, message: str) -> dict[str, Any]:
    return {
        "name": name,
        "layout": case.layout,
        "k": k,
        "engine": VLLM,
        "refused": message,
        "failures": [] if case.may_refuse else [message],
    }


def sampling_record(engine: str, version: str, plain: Sampled, drafted: Sampled) -> dict[str, Any]:
    print(f"\n{sampling_finding(engine, version, plain, drafted)}")
    return {
        "name": f"sampling, {engine}",
        "engine": engine,
        "version": version,
        "plain": plain.as_dict(),
        "drafted": drafted.as_dict(),
        "failures": sampling_failures(engine, version, plain, drafted),
    }


def table_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """What was seen, and of every layout's other engines what was read."""
    rows = []
    for layout in LAYOUTS.values():
        config = family_of(layout.family).config()
        seen = [record for record in records if record.get("layout") == layout.name]
        for serving in layout.serving(config, "TARGET", "HEAD", 3):
            if not serving.engine.startswith("vLLM") or not seen:
                state = "read" if serving.engine.startswith("vLLM") or not serving.seen else "seen"
                rows.append(Row(layout.name, serving.engine, serving.version, state))
                continue
            for record in seen:
                rows.append(seen_row(layout.name, serving.engine, record))
    return rows


def seen_row(layout: str, engine: str, record: dict[str, Any]) -> Row:
    if "refused" in record:
        return Row(layout, engine, "CPU build", f"not served: {record['refused']}", record["k"])
    state = "seen: differs" if record["failures"] else "seen: counters equal ours"
    state += f" ({record['name']})"
    figures = record["vllm"]["tau"], record["ours"]["tau"]
    return Row(layout, engine, f"{record['version']}, CPU build", state, record["k"], *figures)


def vllm_runs(result: dict[str, Any]) -> list[Served]:
    """The runs of a result of serve_vllm.py; an older one is a single run."""
    return [
        Served(
            result["vllm_version"],
            Texts(
                [tuple(row["prompt_ids"]) for row in run["outputs"]],
                [tuple(row["output_ids"]) for row in run["outputs"]],
            ),
            Counters(
                run["counters"]["num_drafts"], tuple(run["counters"]["num_accepted_tokens_per_pos"])
            ),
            result["start_up_s"],
        )
        for run in result.get("runs", [result])
    ]


def counted(completions: Sequence[Completion], drafts: int) -> Counters:
    """Our engine's counters, as vLLM counts."""
    steps = [step for completion in completions for step in completion.steps if step.drafted]
    reached = tuple(sum(step.accepted > at for step in steps) for at in range(drafts))
    return Counters(len(steps), reached)


def last_error(output: str) -> str:
    """The line of an engine's log that says most: the last that names an error."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "Engine core init" not in line]
    return (named or lines or ["no output"])[-1][-300:]


def entry_points(folder: Path) -> Path:
    """A folder on whose path this checkout's entry points are found, as if it were installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = folder / f"{project['name']}-{__version__}.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {__version__}\n"
    (made / "METADATA").write_text(about, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder.resolve()


def show(name: str, row: dict[str, Any]) -> None:
    positions = " ".join(f"{value:.4f}" for value in row["per_position"])
    print(
        f"  {name:26s} drafts {row['drafts']:5d}   tau {row['tau']:.4f}   per position {positions}"
    )


if __name__ == "__main__":
    sys.exit(main())
