"""Checkpoint to serving folder: write, load back, compare logits. Knows no training.

An export that can't be loaded back to the same logits is not left on disk.
"""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_train.attention.packed import RolloutContext
from mtp_train.batches.align import rollout
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import (
    read_json,
    require_writable,
    usual_mode,
    versions,
    write_json,
    write_text,
)
from mtp_train.export import mimo
from mtp_train.heads.base import DraftHead
from mtp_train.heads.mtp import MtpConfig, MtpHead
from mtp_train.models.quantised import NONE
from mtp_train.models.target import Target

FORMATS = ("mimo_mtp",)
FORBIDDEN = (
    "eagle-",
    "eagle3",
    "dflash",
    "dspark",
)  # vLLM reads the method from these in the head's path
TENSORS = "model.safetensors"
CHECK_ROWS = 24
CHECK_STEPS = 3
CHECK_POSITIONS = (1, 5000)


@dataclass(frozen=True)
class ExportConfig:
    """Where a head goes.

    Attributes:
        format: one of `FORMATS`.
    """

    format: str = "mimo_mtp"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(
                "export.format must be one of " + ", ".join(FORMATS),
                self.format,
                "choose one of them",
            )


def export_head(
    head: DraftHead, target: Target, config: ExportConfig, out: Path, figures: dict[str, Any]
) -> dict[str, float]:
    """Write `head` for serving to folder `out`; returns the reload check's largest differences.

    figures: what the model card shows of the evaluation.
    """
    require_servable(out)
    head = mimo.require_head(head)
    mimo.require_target(head, target)
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    require_writable(temporary)
    save_file(
        mimo.export_tensors(head, target.dtype), temporary / TENSORS, metadata={"format": "pt"}
    )
    usual_mode(temporary / TENSORS)
    write_json(temporary / "config.json", mimo.config(target))
    write_text(temporary / "README.md", model_card(target, config, figures, out))
    try:
        check = reload_check(head, target, temporary)
    except UserError:
        shutil.rmtree(temporary)
        raise
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    return check


def import_head(folder: Path, target: Target) -> MtpHead:
    """A head in the MiMo-MTP layout, as a head of ours for `target`."""
    if read_json(folder / "config.json").get("architectures") != ["MiMoForCausalLM"]:
        raise UserError(
            "a head to import must be in a known layout (MiMoForCausalLM)",
            folder,
            "see `mtp-train export` for the formats",
        )
    head = MtpHead(target, MtpConfig(block=mimo.block_kind(target)))
    mimo.import_tensors(load_file(folder / TENSORS), head)
    return head.to(target.device)


def reload_check(head: MtpHead, target: Target, folder: Path) -> dict[str, float]:
    """Logits of the head and of the exported folder, step by step, at low and high positions; raise if they differ.

    Both run in the target's dtype, which the export is written in: the logits must be the same numbers.
    """
    ours = MtpHead(target, head.config).to(target.device)
    ours.load_state_dict(head.state_dict())
    theirs = import_head(folder, target)
    differences: dict[str, float] = {}
    for position in CHECK_POSITIONS:
        pairs = zip(
            _chain_logits(ours, target, position),
            _chain_logits(theirs, target, position),
            strict=True,
        )
        for step, (mine, exported) in enumerate(pairs, start=1):
            differences[f"position {position}, draft step {step}"] = float(
                (mine - exported).abs().max()
            )
    differ = {
        name: value for name, value in differences.items() if value != 0
    }  # not a number differs too
    if not differ and not _reads_as_served(head, target, load_file(folder / TENSORS)):
        differ = {"input rows by the layout's own equation": float("nan")}
    if differ:
        raise UserError(
            "an exported head's logits must be the head's own",
            differ,
            "report this: the layout's mapping is wrong",
        )
    return differences


@torch.no_grad()
def _reads_as_served(head: MtpHead, target: Target, tensors: dict[str, Tensor]) -> bool:
    """Whether input_proj([hidden_layernorm(H) | token_layernorm(E)]), straight from the file, is the head's eh_proj.

    Writing and reading share one mapping: a fault in it cancels out in the comparison of logits, but not here.
    """
    generator = torch.Generator().manual_seed(0)
    embedding_TD, state_TD = torch.randn(2, CHECK_ROWS, target.hidden_size, generator=generator)
    ours = copy.deepcopy(head).to(target.dtype).float().cpu()
    norms = {"hidden_layernorm": state_TD, "token_layernorm": embedding_TD}
    parts = []
    for name, rows_TD in norms.items():
        norm = copy.deepcopy(ours.hnorm)
        norm.weight.copy_(tensors[f"{mimo.PREFIX}{name}.weight"])
        parts.append(norm(rows_TD))
    served = torch.cat(parts, dim=-1) @ tensors[f"{mimo.PREFIX}input_proj.weight"].float().T
    expected = ours.eh_proj(torch.cat([ours.enorm(embedding_TD), ours.hnorm(state_TD)], dim=-1))
    return bool(
        torch.allclose(served, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    )


@torch.inference_mode()
def _chain_logits(head: MtpHead, target: Target, position: int) -> list[Tensor]:
    """Logits of the draft steps of a chain over fixed rows that begin at `position` [rows, V] each."""
    served = head.to(target.dtype)
    generator = torch.Generator().manual_seed(0)
    token_T = torch.randint(target.vocab_size, (CHECK_ROWS,), generator=generator).to(target.device)
    state_TD = torch.randn(CHECK_ROWS, target.hidden_size, generator=generator).to(
        target.device, target.dtype
    )
    aligned = rollout(token_T, torch.ones_like(token_T), [0, CHECK_ROWS], CHECK_STEPS)
    context = RolloutContext([0, CHECK_ROWS])
    logits = []
    for step_token_T, step_position_T in zip(aligned.token_ST, aligned.position_ST, strict=True):
        state_TD = served(target.embed(step_token_T), state_TD, step_position_T + position, context)
        logits.append(target.logits(state_TD).float())
    return logits


def require_servable(out: Path) -> None:
    """Refuse a path that would make vLLM read another method from it."""
    found = [word for word in FORBIDDEN if word in str(out.resolve()).lower()]
    if found:
        raise UserError(
            "a run folder's path must not contain "
            + ", ".join(FORBIDDEN)
            + " (vLLM would override the method)",
            out,
            "use another run folder",
        )


def _quantised(target: Target) -> str:
    return "" if target.quantisation == NONE else f", quantised as {target.quantisation}"


def model_card(target: Target, config: ExportConfig, figures: dict[str, Any], out: Path) -> str:
    """README.md of the export: what it is, how to serve it, what was measured."""
    greedy = figures.get("greedy")
    measured = "Acceptance was not measured before this export."
    if greedy:
        positions = " / ".join(f"{value:.3f}" for value in greedy["per_position"])
        measured = (
            f"Measured in mtp_train's engine, greedy, k = {len(greedy['per_position'])}, "
            f"{greedy['prompts']} held-out prompts: "
            f"tau {greedy['tau']:.3f}, acceptance per position {positions}. "
            "Which k is fastest depends on the machine: the run's report compares them at batch 1."
        )
    folder = target.path.resolve() if target.path else "TARGET"
    libraries = ", ".join(f"{key} {value}" for key, value in versions().items())
    overrides = '{"num_nextn_predict_layers": 1}'
    draft = f'{{"method": "mtp", "model": "{out.resolve()}", "num_speculative_tokens": 3}}'
    return f"""# Draft head for {target.path.name if target.path else "the target"}

An MTP head ({config.format} layout). It drafts for one target only: the weights that mtp_train's
`target_hash` calls `{target.hash}`{_quantised(target)}.
It has no tokenizer, embedding or lm_head: those are the target's.
`config.json` names the target's `model_type` and the layout's architecture, as vLLM expects of an MTP draft.

{measured}

## vLLM (0.32.0, CPU build, tried)

```python
from vllm import LLM

llm = LLM(model="{folder}", hf_overrides={overrides}, speculative_config={draft})
```

`hf_overrides` tells vLLM that the target has an MTP layer beside it. The same as a server (not run here):

```
vllm serve {folder} --hf-overrides '{overrides}' --speculative-config '{draft}'
```

The head's path must not contain {", ".join(f"`{word}`" for word in FORBIDDEN)}: vLLM would take another method.

## SGLang (from its source, not run)

```
python -m sglang.launch_server --model-path {folder} --speculative-algorithm EAGLE \\
    --speculative-draft-model-path {out.resolve()} --speculative-num-steps 3 \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
```

Written by {libraries}. The licence is that of the target's weights and of your training data.
"""
