"""The Medusa layout, which vLLM reads: residual blocks and lm_heads, K of each.

    logits_i = lm_heads[i](h + silu(layers[j] h), once per layer j)

`blocks.{i}.layers.{j}.weight` and `lm_heads.{i}.weight` (vLLM 0.32, medusa.py). A head that reads the target's frozen
lm_head goes out with one copy of it, as `lm_head.weight`, and `original_lm_head: true`: vLLM shares none with Medusa,
and its loader skips what it does not find, so that an absent one would stay uninitialised. Where such a head drafts a
part of the vocabulary, the copy has that part's rows, `token_map` says of which tokens (int64), and
`truncated_vocab_size` how many; else that is the whole vocabulary. vLLM drafts the greatest logit alone.

Published heads in the older names (`{i}.{j}.linear.weight`, `{i}.{layers}.weight`) are read, biases included; how many
heads and layers there are the tensors say, since the authors' config.json files don't always. Heads without lm_heads
read the target's.

Knows tensors and config keys only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export.layout import METHOD_WORDS, Chain, Layout, Serving, require_tensors
from mtp_train.export.layout import cast as as_written
from mtp_train.heads.base import DraftHead
from mtp_train.heads.medusa import MedusaConfig, MedusaHead
from mtp_train.heads.vocabulary import require_vocabulary
from mtp_train.models.target import POST_NORM, Target

SHARED = "lm_head.weight"
TOKENS = "token_map"
LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
OLDER = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


class Medusa(Layout):
    """`medusa`."""

    name = "medusa"
    family = MedusaHead.family
    forbidden = METHOD_WORDS
    vocabularies = True
    needs = ("blocks.0.layers.0.weight|*0.0.linear.weight",)

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from ()

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        if target.logit_softcap is not None and not config.own_lm_heads:
            yield f"a cap on the target's logits ({target.logit_softcap})"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        medusa = cast(MedusaHead, head)
        made = {
            f"blocks.{step}.layers.{at}.{name}": value
            for step, block in enumerate(medusa.blocks)
            for at, layer in enumerate(block)
            for name, value in layer.named_parameters()
        }
        if medusa.vocabulary is not None:
            made[SHARED] = target.lm_head.weight[medusa.vocabulary]
            made[TOKENS] = medusa.vocabulary
        elif medusa.lm_heads is None:
            made[SHARED] = target.lm_head.weight
        else:
            made |= {f"lm_heads.{step}.weight": one for step, one in enumerate(medusa.lm_heads)}
        return as_written(made, dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """No other key may hold `num` and `heads` or `layers`: vLLM would read it as these two."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": head.config.draft_vocabulary or target.vocab_size,
            "num_heads": head.config.steps,
            "num_hidden_layers": head.config.layers,
            "medusa_fc_bias": head.config.bias,
            "original_lm_head": not head.config.own_lm_heads,
            "logit_scale": 1.0,
            "tie_word_embeddings": False,
            "dtype": str(target.dtype).removeprefix("torch."),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        old = "medusa_num_heads" in config and "architectures" not in config
        return config.get("model_type") == "medusa" or old

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        """Older names as today's; biases that are all zero are dropped."""
        renamed = {_renamed(name): value for name, value in tensors.items()}
        biases = {name for name in renamed if name.endswith(".bias")}
        if not any(bool(renamed[name].any()) for name in biases):
            renamed = {name: value for name, value in renamed.items() if name not in biases}
        if not any(name.startswith("lm_head") for name in renamed):  # they read the target's
            renamed[SHARED] = target.lm_head.weight.detach().cpu()
        if TOKENS in renamed and len(renamed.get(SHARED, ())) == target.vocab_size:
            renamed[SHARED] = renamed[SHARED][renamed[TOKENS].long()]  # as vLLM cuts it
        return renamed

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        settings = _settings(config, target, tensors)
        require_tensors(tensors, _wanted(settings, target))
        head = MedusaHead(target, settings)
        with torch.no_grad():
            for step, block in enumerate(head.blocks):
                for at, layer in enumerate(block):
                    for name, value in layer.named_parameters():
                        value.copy_(tensors[f"blocks.{step}.layers.{at}.{name}"])
            if head.vocabulary is not None:
                token_U = tensors[TOKENS].long()
                require_vocabulary(token_U, target.vocab_size)
                head.vocabulary.copy_(token_U)
                _require_targets(tensors[SHARED], target.lm_head.weight[head.vocabulary])
            elif head.lm_heads is None:
                _require_targets(tensors[SHARED], target.lm_head.weight)
            else:
                for step, one in enumerate(head.lm_heads):
                    one.copy_(tensors[f"lm_heads.{step}.weight"])
        return head

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        logits = []
        for step in range(chain.steps):
            read_D = chain.states[POST_NORM][-1]
            for at in range(config["num_hidden_layers"]):
                layer = f"blocks.{step}.layers.{at}"
                moved = tensors[f"{layer}.weight"] @ read_D
                if config["medusa_fc_bias"]:
                    moved = moved + tensors[f"{layer}.bias"]
                read_D = read_D + torch.nn.functional.silu(moved)
            own = SHARED if config["original_lm_head"] else f"lm_heads.{step}.weight"
            logits.append(_over_target(tensors[own] @ read_D, tensors, config))
        return logits

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        draft = json.dumps({"method": "medusa", "model": head, "num_speculative_tokens": drafts})
        how = f"```\nvllm serve {target} --speculative-config '{draft}'\n```"
        return [Serving("vLLM, method `medusa`", "0.32.0, CPU build", True, how)]


def _settings(
    config: Mapping[str, Any], target: Target, tensors: Mapping[str, Tensor]
) -> MedusaConfig:
    """The head that a folder holds; what ours can't be is an error that names it."""
    odd = []
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(name, size) != size:
            odd.append(f"{name} {config[name]} for {size}")
    drafted = len(tensors[TOKENS]) if TOKENS in tensors else target.vocab_size
    if config.get("truncated_vocab_size") not in (None, drafted):
        odd.append(f"truncated_vocab_size {config['truncated_vocab_size']} for {drafted}")
    if TOKENS in tensors and SHARED not in tensors:
        odd.append(f"{TOKENS} beside lm_heads of its own")
    if config.get("logit_scale", 1.0) != 1.0:
        odd.append(f"logit_scale {config['logit_scale']}")
    if odd:
        raise UserError(
            "a medusa head to import must draft the target's tokens from its states",
            ", ".join(odd),
            "name the target it was trained for, or use another head",
        )
    places = [(int(match[1]), int(match[2])) for match in map(LAYER.match, tensors) if match]
    return MedusaConfig(
        steps=max([0, *(step for step, _ in places)]) + 1,
        layers=max([0, *(at for _, at in places)]) + 1,
        bias=any(name.endswith(".bias") for name in tensors),
        own_lm_heads=SHARED not in tensors,
        draft_vocabulary=len(tensors[TOKENS]) if TOKENS in tensors else 0,
    )


def _wanted(settings: MedusaConfig, target: Target) -> dict[str, Tensor]:
    """The layout's tensors for such a head, without storage."""
    width, rows = target.hidden_size, settings.draft_vocabulary or target.vocab_size
    steps = range(settings.steps)
    outputs = [f"lm_heads.{step}.weight" for step in steps] if settings.own_lm_heads else [SHARED]
    layers = [f"blocks.{step}.layers.{at}" for step in steps for at in range(settings.layers)]
    sizes: dict[str, tuple[int, ...]] = {f"{layer}.weight": (width, width) for layer in layers}
    sizes |= {f"{layer}.bias": (width,) for layer in layers if settings.bias}
    sizes |= dict.fromkeys(outputs, (rows, width))
    made = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    if settings.draft_vocabulary:
        made[TOKENS] = torch.empty(rows, dtype=torch.int64, device="meta")
    return made


def _over_target(
    logits_U: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Tensor:
    """Logits over the target's vocabulary [V]; -inf where a token can't be drafted."""
    if config["truncated_vocab_size"] == config["vocab_size"]:
        return logits_U
    whole_V = torch.full((config["vocab_size"],), float("-inf"))
    whole_V[tensors[TOKENS]] = logits_U
    return whole_V


def _require_targets(weight_VD: Tensor, own_VD: Tensor) -> None:
    if weight_VD.shape != own_VD.shape or not torch.equal(weight_VD.to(own_VD), own_VD):
        raise UserError(
            "a medusa head with original_lm_head must hold the target's own lm_head",
            f"another {SHARED}",
            "name the target it was trained for",
        )


def _renamed(name: str) -> str:
    match = OLDER.fullmatch(name)
    if match is None:
        return name.removeprefix("medusa_heads.")
    step, at, linear, kind = match.groups()
    return f"blocks.{step}.layers.{at}.{kind}" if linear else f"lm_heads.{step}.{kind}"
