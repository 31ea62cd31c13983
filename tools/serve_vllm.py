"""Serve prompts in stock vLLM, with or without a draft head, and write its own counters.

Runs inside the serving environment (`tools/setup_serving.sh`), so it imports only the standard
library, torch and vLLM. It knows nothing of mtp_train: that is what makes it a witness.

    .venv-serving/bin/python tools/serve_vllm.py --target DIR --head DIR --method mtp \
        --prompts prompt_ids.jsonl --k 3 --out result.json

One start serves several files of prompts, each with counters of its own; a prompt's line may name its own
`max_new_tokens`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

# vLLM reads these when it is imported; what the caller has set wins.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "OMP_NUM_THREADS": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Substrings of the head's path that make vLLM choose another method than the one asked for.
METHOD_OVERRIDES = ("eagle-", "eagle3", "dflash", "dspark")
METHODS = ("mtp", "eagle", "eagle3", "peagle", "medusa", "draft_model", "speculators", "none")
# Methods that no path overrides.
NO_PATH_MATTERS = ("eagle", "eagle3", "peagle", "speculators", "none")
PARALLEL = {"peagle": "eagle3"}  # what vLLM calls them; one forward drafts all tokens
MIMO = ["MiMoForCausalLM"]
SMALLEST_CONTEXT = 1024
COUNTER_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """vLLM's speculative counters; a draft is one proposal of k tokens for one sequence."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]

    def minus(self, earlier: Counters) -> Counters:
        before = earlier.num_accepted_tokens_per_pos or [0] * len(self.num_accepted_tokens_per_pos)
        return Counters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [a - b for a, b in zip(self.num_accepted_tokens_per_pos, before, strict=True)],
        )


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    max_new_tokens: int | None = None  # None: as many as the others


@dataclass(frozen=True)
class Group:
    """Prompts that are served together."""

    name: str
    prompts: list[Prompt]
    temperature: float


def main() -> int:
    args = parse_args()
    try:
        files = [(path, args.temperature) for path in args.prompts]
        files += [(args.sampled, 1.0)] if args.sampled else []
        groups = [Group(path.stem, read_prompts(path), temperature) for path, temperature in files]
        check_head(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    result = serve(args, groups)
    write_json(args.out, result)
    print("\n".join(summary(result, run) for run in result["runs"]))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--head", type=Path, help="folder of the exported head; without one mtp is the target's own"
    )
    parser.add_argument(
        "--method", choices=METHODS, required=True, help="vLLM's; `speculators` serves the head"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        nargs="+",
        help='JSON lines, each {"prompt_ids": [..]}; every file is a run of its own',
    )
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="sequences served at once")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--sampled", type=Path, help="prompts to serve at temperature 1 as well")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt; ValueError names the first line that isn't one."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            ids = row["prompt_ids"]
        except (ValueError, KeyError, TypeError):
            ids = None
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(
                f'{path}:{number}: every line must be {{"prompt_ids": [int, ..]}}, '
                f"got {line[:60]!r}; write the prompts as token ids"
            )
        prompts.append(Prompt(ids, row.get("max_new_tokens")))
    if not prompts:
        raise ValueError(f"{path}: at least one prompt is needed, got none; check the file")
    return prompts


def check_head(args: argparse.Namespace) -> None:
    if args.head is None and args.method not in ("none", "mtp"):
        raise ValueError(f"--method {args.method} needs a head, got none; pass --head DIR")
    for folder in filter(None, (args.target, args.head)):
        if not (folder / "config.json").is_file():
            raise ValueError(f"a model folder holds a config.json, {folder} has none; check it")
    found = [s for s in METHOD_OVERRIDES if s in str(args.head).lower()]
    if args.method not in NO_PATH_MATTERS and args.head is not None and found:
        raise ValueError(
            f"the head's path must not contain {found[0]!r} (vLLM would override the method), "
            f"got {args.head}; move or rename the folder"
        )


def serve(args: argparse.Namespace, groups: list[Group]) -> dict[str, Any]:
    """Generate for every group; counters and times exclude a short warm-up."""
    import torch
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(**engine_arguments(args, [one for group in groups for one in group.prompts]))
    start_up_s = time.perf_counter() - started
    generate(llm, [Prompt(groups[0].prompts[0].ids[:4])], 4, 0.0)
    return {
        "vllm_version": vllm.__version__,
        "torch_version": torch.__version__,
        "settings": {key: settable(value) for key, value in vars(args).items()},
        "environment": {name: os.environ[name] for name in ENVIRONMENT},
        "start_up_s": round(start_up_s, 3),
        "runs": [measured(llm, group, args.max_new_tokens) for group in groups],
    }


def measured(llm: LLM, group: Group, max_tokens: int) -> dict[str, Any]:
    """One batch of prompts: outputs, counters, time."""
    before, started = read_counters(llm), time.perf_counter()
    outputs = generate(llm, group.prompts, max_tokens, group.temperature)
    generation_s = time.perf_counter() - started
    counters = read_counters(llm).minus(before)
    rows = [
        {"prompt_ids": prompt.ids, "output_ids": list(output.outputs[0].token_ids)}
        for prompt, output in zip(group.prompts, outputs, strict=True)
    ]
    new_tokens = sum(len(row["output_ids"]) for row in rows)
    return {
        "prompts": group.name,
        "temperature": group.temperature,
        "counters": asdict(counters),
        "acceptance": acceptance(counters),
        "new_tokens": new_tokens,
        "generation_s": round(generation_s, 3),
        "tokens_per_s": round(new_tokens / generation_s, 2),
        "outputs": rows,
    }


def generate(
    llm: LLM, prompts: list[Prompt], max_tokens: int, temperature: float
) -> list[RequestOutput]:
    import vllm

    sampling = [
        vllm.SamplingParams(
            temperature=temperature,
            max_tokens=prompt.max_new_tokens or max_tokens,
            detokenize=False,
        )
        for prompt in prompts
    ]
    requests = [vllm.TokensPrompt(prompt_token_ids=prompt.ids) for prompt in prompts]
    outputs: list[RequestOutput] = llm.generate(requests, sampling)
    return outputs


def engine_arguments(args: argparse.Namespace, prompts: list[Prompt]) -> dict[str, Any]:
    # vLLM stops drafting close to the end of the context: leave room for one more proposal.
    needed = max(len(prompt.ids) for prompt in prompts) + args.max_new_tokens + args.k + 1
    arguments: dict[str, Any] = {
        "model": str(args.target),
        "dtype": args.dtype,
        "enforce_eager": True,
        "enable_prefix_caching": False,  # runs on the same prompts do the same work
        "max_model_len": max(SMALLEST_CONTEXT, needed),
        "max_num_seqs": args.max_num_seqs,
        "disable_log_stats": False,  # the counters are part of the statistics
        "seed": 0,
    }
    if args.method == "speculators":
        # The head's folder names its target and k.
        return arguments | {"model": str(args.head), "tokenizer": str(args.target)}
    if args.method != "none":
        arguments["speculative_config"] = {
            "method": PARALLEL.get(args.method, args.method),
            "num_speculative_tokens": args.k,
        } | ({} if args.head is None else {"model": str(args.head)})
        if args.method in PARALLEL:
            arguments["speculative_config"]["parallel_drafting"] = True
    if args.head is not None and architectures(args.head) == MIMO:
        # vLLM's MiMo-MTP class builds itself from the target's config, which has no such entry.
        arguments["hf_overrides"] = {"num_nextn_predict_layers": 1}
    return arguments


def architectures(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")


def read_counters(llm: LLM) -> Counters:
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTER_PREFIX):
            value = metric.values if hasattr(metric, "values") else metric.value
            values[metric.name.removeprefix(COUNTER_PREFIX)] = value
    return Counters(
        num_drafts=int(values.get("drafts", 0)),
        num_draft_tokens=int(values.get("draft_tokens", 0)),
        num_accepted_tokens=int(values.get("accepted_tokens", 0)),
        num_accepted_tokens_per_pos=[int(v) for v in values.get("accepted_tokens_per_pos", [])],
    )


def acceptance(counters: Counters) -> dict[str, Any] | None:
    """tau = 1 + accepted / drafts; per position: share of drafts accepted up to there.

    Both are vLLM's definitions (`vllm/v1/spec_decode/metrics.py`); None without a head.
    """
    if counters.num_drafts == 0:
        return None
    return {
        "tau": 1 + counters.num_accepted_tokens / counters.num_drafts,
        "acceptance_rate": counters.num_accepted_tokens / counters.num_draft_tokens,
        "per_position_unconditional": [
            accepted / counters.num_drafts for accepted in counters.num_accepted_tokens_per_pos
        ],
    }


def settable(value: Any) -> Any:
    if isinstance(value, list):
        return [settable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def summary(result: dict[str, Any], run: dict[str, Any]) -> str:
    line = (
        f"vLLM {result['vllm_version']}, {run['prompts']}, temperature {run['temperature']:g}: "
        f"{run['new_tokens']} tokens in {run['generation_s']:.1f} s, {run['tokens_per_s']:.1f} tokens/s"
    )
    measured = run["acceptance"]
    if measured is None:
        return line
    positions = " ".join(f"{rate:.4f}" for rate in measured["per_position_unconditional"])
    drafts = run["counters"]["num_drafts"]
    return f"{line}; {drafts} drafts, tau {measured['tau']:.4f}, per position {positions}"


if __name__ == "__main__":
    sys.exit(main())
