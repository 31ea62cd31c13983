"""Hold our engine's acceptance against stock vLLM's own counters, on the head that the demo exported.

Two checks, both greedy, in the dtype that serves:

1. The run's exported head on its held-out prompts. bfloat16 engines part at near-ties and then count along different
   texts, so our engine drafts along vLLM's outputs (a script of the target's choices): same text, same drafts wanted.
   Our free-running counters are printed beside them.
2. A head overfitted on one sample: a faithful chain accepts nearly everything, in our engine and in vLLM.

    python tools/verify_serving.py --run runs/smollm2_mtp_cpu --prompts 48
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from mtp_train.cli.job import Job
from mtp_train.core.dist import Ranks
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json, write_json
from mtp_train.core.records import Accounting
from mtp_train.engine.chain import ChainProposer
from mtp_train.engine.engine import Engine, EngineConfig
from mtp_train.engine.sequences import Completion, Request
from mtp_train.evaluate.acceptance import acceptance
from mtp_train.evaluate.lossless import first_difference
from mtp_train.export.stage import ExportConfig, export_head, import_head
from mtp_train.heads.base import DraftHead
from mtp_train.heads.mtp import MtpConfig, MtpHead, build
from mtp_train.models.target import Target
from mtp_train.precompute.sources import EngineStates
from mtp_train.precompute.stage import PrecomputeConfig, precompute
from mtp_train.store.shards import FeatureStore
from mtp_train.text.joined import join_turns
from mtp_train.text.sources import Answer, read_answers
from mtp_train.train.config import TrainConfig
from mtp_train.train.loop import train

TAU_TOLERANCE = 0.05
POSITION_TOLERANCE = 0.03
OVERFIT_ACCEPTANCE = 0.95
HERE = Path(__file__).resolve().parent
SERVING_PYTHON = HERE.parent / ".venv-serving" / "bin" / "python"


def main() -> int:
    args = parse_args()
    try:
        rows = [recorded(args)] if args.result else serving_checks(args)
    except UserError as error:
        print(f"verify-serving: error: {error}", file=sys.stderr)
        return 2
    failures = [failure for row in rows for failure in row["failures"]]
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
    parser.add_argument(
        "--result", type=Path, help="compare with this output of serve_vllm.py instead of serving"
    )
    parser.add_argument(
        "--head", type=Path, help="with --result: the exported head that was served"
    )
    return parser.parse_args()


def serving_checks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both checks on the run's export."""
    job = Job([f"recipe={args.recipe}", f"run={args.run}"])
    job.folder.require("export")
    answers = read_answers(job.folder.answers("heldout"), Accounting())[: args.prompts]
    folder = job.folder.export("mimo_mtp")
    theirs = serve(args, job.target(), folder, [answer.prompt_ids for answer in answers], "heldout")
    prompts, outputs = theirs["prompts"], theirs["outputs"]
    rows = [compare(job, import_head(folder, job.target())[1], theirs, args)]
    index, length = rows[0]["longest_common"]
    sample = Answer("sample", "all", (), prompts[index], outputs[index][:length], "length")
    rows.append(overfitted(job, sample, args))
    write_json(args.run / "serving" / "comparison.json", rows)
    return rows


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Any exported head against a recorded vLLM run of it."""
    if args.head is None:
        raise UserError("--result needs the head that was served", "no --head", "name its folder")
    job = Job([f"recipe={args.recipe}"])
    theirs = vllm_figures(read_json(args.result))
    return compare(job, import_head(args.head, job.target())[1], theirs, args)


def compare(
    job: Job, head: DraftHead, theirs: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Our counters beside vLLM's, along its text and running free."""
    prompts, outputs = theirs.pop("prompts"), theirs.pop("outputs")
    stop = job.stop
    asked = [
        Request(str(index), prompt, args.max_new_tokens, stop)
        for index, prompt in enumerate(prompts)
    ]
    scripted = [
        replace(request, max_new_tokens=len(output), script=output)
        for request, output in zip(asked, outputs, strict=True)
    ]
    same_text = run_ours(job.target(), head, scripted, args)
    free = run_ours(job.target(), head, asked, args)
    dtype = job.config["target"]["dtype"]
    print(f"\n{len(prompts)} prompts, k = {args.k}, greedy, {dtype}, vLLM {theirs['version']}")
    show("vLLM", theirs)
    show("ours, along vLLM's text", figures(same_text, args.k))
    show("ours, running free", figures(free, args.k))
    common = [first_difference(o, c.tokens) for o, c in zip(outputs, free, strict=True)]
    same = sum(o == c.tokens for o, c in zip(outputs, free, strict=True))
    print(f"  texts: {same} of {len(outputs)} equal; the others part at near-ties")
    ours = figures(same_text, args.k)
    return {
        "check": "export",
        "vllm": theirs,
        "ours": ours,
        "ours_free": figures(free, args.k),
        "longest_common": [common.index(max(common)), max(common)],
        "failures": gaps(theirs, ours),
    }


def overfitted(job: Job, answer: Answer, args: argparse.Namespace) -> dict[str, Any]:
    """Check 2: a head overfitted on one sample, in both engines.

    The sample is the longest text that both engines wrote: where they part at a near-tie, the head learns the
    trainer's choice and vLLM's counts as a miss.
    """
    target = job.target()
    with tempfile.TemporaryDirectory() as scratch:
        head = overfit(target, answer, Path(scratch))
        folder = args.run / "serving" / "overfitted"
        export_head(head, target, ExportConfig(), folder, {})
        # Drafts past the trained text are guesses: stop k tokens before its end.
        args.max_new_tokens = len(answer.output_ids) - args.k - 1
        theirs = serve(args, target, folder, [answer.prompt_ids], "overfitted")
    theirs.pop("prompts")
    output = theirs.pop("outputs")[0]
    request = Request(answer.key, answer.prompt_ids, len(output), job.stop, output)
    ours = figures(run_ours(target, head, [request], args), args.k)
    print(f"\na head overfitted on one sample of {len(answer.output_ids)} tokens")
    show("vLLM", theirs)
    show("ours", ours)
    rates = {"vLLM": theirs["acceptance_rate"], "ours": ours["acceptance_rate"]}
    failures = [
        f"an overfitted head accepts {value:.1%} in {name}, {OVERFIT_ACCEPTANCE:.0%} is expected"
        for name, value in rates.items()
        if value < OVERFIT_ACCEPTANCE
    ]
    return {"check": "overfitted", "vllm": theirs, "ours": ours, "failures": failures}


def overfit(target: Target, answer: Answer, scratch: Path, epochs: int = 150) -> MtpHead:
    """Train a head on one answer until it knows it."""
    (sequence, _), *_ = join_turns([answer])
    accounting = Accounting(used=1).as_dict()
    source = EngineStates(target)
    precompute(source, [sequence], PrecomputeConfig(), scratch / "features", accounting, Ranks())
    store = FeatureStore(scratch / "features")
    head = build(target, MtpConfig())
    accelerator = Accelerator(
        mixed_precision="bf16" if target.dtype == torch.bfloat16 else "no",
        cpu=target.device.type == "cpu",
    )
    settings = TrainConfig(
        epochs=epochs, learning_rate=2e-3, decay=1.0, validations=1, checkpoints=1
    )
    train(target, head, store, store, settings, accelerator, scratch / "train")
    return head


def serve(
    args: argparse.Namespace,
    target: Target,
    head: Path,
    prompts: Sequence[tuple[int, ...]],
    name: str,
) -> dict[str, Any]:
    """Serve the prompts in stock vLLM; its counters and outputs."""
    if not SERVING_PYTHON.is_file():
        raise UserError(
            "vLLM must be installed in its own environment",
            SERVING_PYTHON,
            "run make verify-serving",
        )
    folder = args.run / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    asked, out = folder / f"{name}-prompts.jsonl", folder / f"{name}-vllm.json"
    lines = [json.dumps({"prompt_ids": list(prompt)}) + "\n" for prompt in prompts]
    asked.write_text("".join(lines), encoding="utf-8")
    print(f"verify-serving: vLLM serves {len(prompts)} prompts ({name})", flush=True)
    command = [
        str(SERVING_PYTHON),
        str(HERE / "serve_vllm.py"),
        "--target",
        str(target.path),
        "--head",
        str(head),
        "--method",
        "mtp",
    ]
    command += [
        "--prompts",
        str(asked),
        "--k",
        str(args.k),
        "--max-new-tokens",
        str(args.max_new_tokens),
    ]
    command += ["--max-num-seqs", str(args.batch), "--out", str(out)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        tail = " | ".join(done.stdout.strip().splitlines()[-5:])
        raise UserError("vLLM must serve the exported head", tail, "see SERVING notes in docs/")
    return vllm_figures(json.loads(out.read_text(encoding="utf-8")))


def vllm_figures(result: dict[str, Any]) -> dict[str, Any]:
    """vLLM's counters under the names that ours have."""
    counted, named = result["counters"], result["acceptance"]
    return {
        "drafts": counted["num_drafts"],
        "tau": named["tau"],
        "per_position": named["per_position_unconditional"],
        "acceptance_rate": named["acceptance_rate"],
        "version": result["vllm_version"],
        "prompts": [tuple(row["prompt_ids"]) for row in result["outputs"]],
        "outputs": [tuple(row["output_ids"]) for row in result["outputs"]],
    }


def run_ours(
    target: Target, head: DraftHead, requests: Sequence[Request], args: argparse.Namespace
) -> list[Completion]:
    engine = Engine(target, ChainProposer(target, head, args.k), EngineConfig(max_batch=args.batch))
    return engine.generate(requests)


def figures(completions: Sequence[Completion], drafts: int) -> dict[str, Any]:
    whole = acceptance(
        completions, {completion.key: "all" for completion in completions}, 0.0, drafts
    )
    return {key: whole[key] for key in ("drafts", "tau", "per_position", "acceptance_rate")}


def gaps(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Differences above the tolerances."""
    found = []
    if abs(theirs["tau"] - ours["tau"]) > TAU_TOLERANCE:
        found.append(
            f"tau {ours['tau']:.3f} against vLLM's {theirs['tau']:.3f} (tolerance {TAU_TOLERANCE})"
        )
    for position, (mine, its) in enumerate(
        zip(ours["per_position"], theirs["per_position"], strict=True), start=1
    ):
        if abs(mine - its) > POSITION_TOLERANCE:
            found.append(
                f"position {position} {mine:.3f} against {its:.3f} (tolerance {POSITION_TOLERANCE})"
            )
    return found


def show(name: str, row: dict[str, Any]) -> None:
    positions = " ".join(f"{value:.4f}" for value in row["per_position"])
    print(
        f"  {name:26s} drafts {row['drafts']:5d}   tau {row['tau']:.4f}   per position {positions}"
    )


if __name__ == "__main__":
    sys.exit(main())
