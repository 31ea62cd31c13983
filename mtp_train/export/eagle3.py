"""The EAGLE-3 layout, with 3.1's flags: an `eagle3` head for vLLM, SGLang and TensorRT-LLM.

    h      = fc([g1 | g2 | g3])                                     fc_norm: each g normed; norm_before_fc: all as one
    r      = h + attention([input_layernorm(E) | hidden_norm(h)])   norm_before_residual: hidden_norm(h) + ...
    out    = r + mlp(post_attention_layernorm(r))                   then whole layers, in a head of several
    logits = lm_head(norm(out))                                     out is fed back; norm_output: norm(out) is

(vLLM 0.32 `llama_eagle3.py`; SGLang `llama_eagle3.py`.) `lm_head` row i drafts the target's token i + d2t[i]; t2d tells
which tokens have a row. Which layers g are of is said twice, since engines count differently: vLLM by the layers that
have run, at the top level, SGLang by the last of them, in `eagle_config`. A window is `layer_types` with
`sliding_window`: vLLM's Llama layers look their type up from the draft's first layer on in this method, in `eagle` from
the target's first.

Knows tensors and config keys only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.layout import Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.reference import Layer, chained
from mtp_train.heads.base import DraftHead
from mtp_train.heads.eagle3 import STATES, Eagle3Config, Eagle3Head
from mtp_train.heads.vocabulary import require_vocabulary
from mtp_train.models.target import POST_NORM, Target, layer_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of Eagle3Config too
DEEP = re.compile(r"midlayer\.(\d+)\.")
OFFSETS, MEMBERS, LM_HEAD = "d2t", "t2d", "lm_head.weight"
MASK = "mask_hidden"  # of heads that draft in parallel
NEEDS = ("midlayer.hidden_norm.weight|midlayer.0.hidden_norm.weight|layers.0.hidden_norm.weight",)


class Eagle3(Layout):
    """`eagle3`."""

    name = "eagle3"
    family = Eagle3Head.family
    windows = True
    vocabularies = True
    prefix = "midlayer."  # of the block; SGLang knows no other name, vLLM both
    needs: ClassVar[tuple[str, ...]] = NEEDS
    never: ClassVar[tuple[str, ...]] = (MASK,)
    made: ClassVar[tuple[type[Any], type[Any]]] = (Eagle3Config, Eagle3Head)

    def head_faults(self, config: Any) -> Iterator[str]:
        if POST_NORM in config.states:
            yield f"head.states with {POST_NORM} (engines give states without the final norm)"

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.block_faults(config, target, {*llama.MATRICES, *llama.NORMS})
        ids = [layer_of(name, target.layers) for name in config.states]
        if ids != sorted(set(ids)):
            yield f"head.states {config.states} (vLLM gives them in the order of layers)"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        ours = head.state_dict()
        found = {theirs: ours[mine] for theirs, mine in self.names(head).items()}
        return cast(found | vocabulary_tensors(head.vocabulary, target.vocab_size), dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        ids = [layer_of(name, target.layers) for name in head.states]
        return (
            llama.dimensions(target, head.config.layer)
            | llama.window_keys(head.config.window, head.config.layers)
            | {flag: getattr(head.config, flag) for flag in FLAGS}
            | {
                "architectures": [ARCHITECTURE],
                "model_type": "llama",
                "num_hidden_layers": head.config.layers,
                "draft_vocab_size": len(head.state_dict()[LM_HEAD]),
                "target_hidden_size": target.hidden_size,
                "num_aux_hidden_states": len(ids),
                IDS: ids,
                "eagle_config": {
                    IDS: [number - 1 for number in ids],
                    "use_aux_hidden_state": True,
                    "norm_before_fc": head.config.norm_before_fc,
                },
            }
        )

    def recognises(self, config: Mapping[str, Any]) -> bool:
        known = ([ARCHITECTURE], ["Eagle3LlamaForCausalLM"])
        return config.get("architectures") in known and "speculators_config" not in config

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> Eagle3Head:
        _require_known(config)
        block = llama.settings(config, target, tensors, self.prefix)
        vocabulary_U = read_vocabulary(tensors, target.vocab_size)
        nested = config.get("eagle_config") or {}
        flags: dict[str, Any] = {name: bool(config.get(name)) for name in FLAGS}
        flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
        settings_class, head_class = self.made
        settings = settings_class(
            **block,
            window=llama.read_window(config, block["layers"]),
            states=[f"layer_{number}" for number in layer_ids(config, target.layers)],
            draft_vocabulary=0 if vocabulary_U is None else len(vocabulary_U),
            **flags,
            **self.options(config),
        )
        head: Eagle3Head = head_class(target, settings)
        ours, names = head.state_dict(), self.names(head)
        wanted = {theirs: ours[mine] for theirs, mine in names.items()}
        require_tensors(tensors, wanted, {OFFSETS, MEMBERS})
        loaded = {mine: tensors[theirs].float() for theirs, mine in names.items()}
        if vocabulary_U is not None:
            order_U = vocabulary_U.argsort()
            loaded[LM_HEAD] = loaded[LM_HEAD][order_U]
            loaded["vocabulary"] = vocabulary_U[order_U]
            require_vocabulary(loaded["vocabulary"], target.vocab_size)
        head.load_state_dict(loaded)
        return head

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a config.json says beside layers, flags and states."""
        return {}

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        equation = Equation(tensors, config, self.prefix)
        return chained(equation.step, chain, equation.fused_states(chain), equation.lm_head)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        flags = [flag for flag in FLAGS if getattr(config, flag)]
        flags += ["the window"] * bool(config.window)
        sglang = llama.sglang("EAGLE3", target, head, drafts)
        if flags:
            sglang = f"Its EAGLE-3 model leaves out {', '.join(flags)}, which this head needs."
        elif config.layers > 1:
            sglang = "Its EAGLE-3 model computes layers after the first in another way, under other names."
        return [
            Serving(
                "vLLM, method `eagle3`",
                "0.32.0, CPU build",
                True,
                llama.vllm("eagle3", target, head, drafts),
            ),
            Serving("SGLang, algorithm `EAGLE3`", "mid 2026", False, sglang),
        ]

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        found = {
            _renamed(name, self.prefix): value
            for name, value in llama.tidied(tensors, target, shared_lm_head=False).items()
        }
        if LM_HEAD not in found and OFFSETS not in found:  # engines take the target's
            found[LM_HEAD] = target.lm_head.weight.detach().cpu()
        return found

    def names(self, head: DraftHead) -> dict[str, str]:
        """Name in the layout -> name in `Eagle3Head`."""
        outer = ["fc.weight", "norm.weight", LM_HEAD]
        outer += [f"fc_norm.{part}.weight" for part in range(STATES * head.config.fc_norm)]
        outer += ["input_norm.weight"] * head.config.norm_before_fc
        return (
            llama.layer_names(head, self.prefix)
            | {f"{self.prefix}hidden_norm.weight": "hidden_norm.weight"}
            | {name: name for name in outer}
        )


class Equation:
    """What vLLM computes, from a folder's tensors (float32) and its config.json alone."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], prefix: str):
        self.tensors, self.config, self.prefix = tensors, config, prefix
        self.layer = Layer(tensors, config, prefix)

    def fused_states(self, chain: Chain) -> Tensor:
        """h of a text's rows [T, D]."""
        numbered = {layer_of(name, chain.target.layers): v for name, v in chain.states.items()}
        return self.fused([numbered[number] for number in sorted(set(self.config[IDS]))])

    def fused(self, parts: list[Tensor]) -> Tensor:
        """h of three states [T, D]."""
        if self.config["fc_norm"]:
            parts = [self.layer.norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(parts)]
        states = torch.cat(parts, dim=-1)
        if self.config["norm_before_fc"]:
            states = self.layer.norm("input_norm.weight", states)
        return states @ self.tensors["fc.weight"].T

    def step(self, embedding: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """What lm_head reads of rows that see each other causally, and what is fed back [T, D] each."""
        layer, prefix, config = self.layer, self.prefix, self.config
        token = layer.norm(f"{prefix}input_layernorm.weight", embedding)
        hidden = layer.norm(f"{prefix}hidden_norm.weight", state)
        residual = hidden if config["norm_before_residual"] else state
        rows = residual + layer.attention(torch.cat([token, hidden], dim=-1), position)
        rows = rows + layer.mlp(layer.norm(f"{prefix}post_attention_layernorm.weight", rows))
        for number in range(1, config["num_hidden_layers"]):
            rows = Layer(self.tensors, config, f"layers.{number}.").whole(rows, position)
        read = layer.norm("norm.weight", rows)
        return read, read if config["norm_output"] else rows

    def lm_head(self, read_ND: Tensor) -> Tensor:
        """Logits over the target's vocabulary [N, V]; -inf where a token can't be drafted."""
        logits_NU = read_ND @ self.tensors[LM_HEAD].T
        if OFFSETS not in self.tensors:
            return logits_NU
        whole_NV = torch.full((len(logits_NU), self.config["vocab_size"]), float("-inf"))
        drafted_U = torch.arange(self.config["draft_vocab_size"]) + self.tensors[OFFSETS]
        whole_NV[:, drafted_U] = logits_NU
        return whole_NV


def vocabulary_tensors(vocabulary_U: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """d2t (int64 offsets) and t2d (bool) of a draft vocabulary; none for the whole one, as vLLM wants it."""
    if vocabulary_U is None or len(vocabulary_U) == vocab_size:
        return {}
    chosen_U = vocabulary_U.cpu()
    member_V = torch.zeros(vocab_size, dtype=torch.bool)
    member_V[chosen_U] = True
    return {OFFSETS: chosen_U - torch.arange(len(chosen_U)), MEMBERS: member_V}


def read_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target ids [U] of the lm_head's rows; none for the whole vocabulary.

    Raises:
        UserError: d2t leaves the vocabulary, or t2d says otherwise.
    """
    if OFFSETS not in tensors:
        rows = len(tensors[LM_HEAD]) if LM_HEAD in tensors else vocab_size
        if rows < vocab_size:
            raise UserError(
                f"an eagle3 head that drafts {rows} of {vocab_size} tokens must say which",
                f"no {OFFSETS}",
                "copy the whole folder, or use its own target",
            )
        return None
    offset_U = tensors[OFFSETS].long()
    chosen_U = offset_U + torch.arange(len(offset_U))
    if len(offset_U) == vocab_size and not bool(offset_U.any()):
        return None
    if bool((chosen_U < 0).any()) or bool((chosen_U >= vocab_size).any()):
        raise UserError(
            f"d2t must lead to tokens below {vocab_size}",
            f"{int(chosen_U.min())} to {int(chosen_U.max())}",
            "use the head's own target",
        )
    if MEMBERS in tensors:
        member_V = torch.zeros(vocab_size, dtype=torch.bool)
        member_V[chosen_U] = True
        if not torch.equal(tensors[MEMBERS].bool(), member_V):
            raise UserError(
                "t2d must name the tokens that d2t leads to",
                f"{int(tensors[MEMBERS].sum())} tokens against {len(chosen_U)}",
                "export the head again: one of them is of another head",
            )
    return chosen_U


def layer_ids(config: Mapping[str, Any], layers: int) -> list[int]:
    """The auxiliary layers by vLLM's count, in rising order; its default where the config says none."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    said = config.get(IDS) or (nested and [number + 1 for number in nested])
    ids = sorted(set(said or (2, layers // 2, layers - 3)))
    if len(ids) != STATES or ids[0] < 0 or ids[-1] > layers:
        raise UserError(
            f"an eagle3 head must read {STATES} of the target's {layers} layers",
            f"{IDS} {said or f'none, by default {ids}'}",
            f"write its ids into config.json as {IDS}",
        )
    return ids


def _require_known(config: Mapping[str, Any]) -> None:
    nested = config.get("eagle_config") or {}
    odd = []
    if not nested.get("use_aux_hidden_state", True):
        odd.append("use_aux_hidden_state false")
    if odd:
        raise UserError(
            "an eagle3 head must read three fused states",
            ", ".join(odd),
            "this kind is not trained or run here",
        )


def _renamed(name: str, first: str) -> str:
    """A tensor's name with its first decoder layer below `first`, and later ones as plain layers.

    NVIDIA's Megatron exports number them all (`midlayer.1.`) and call a later layer's input norm `hidden_norm`.
    """
    deep = DEEP.match(name)
    if deep and int(deep[1]) > 0:
        rest = name.removeprefix(deep[0]).replace("hidden_norm.", "input_layernorm.")
        return f"layers.{deep[1]}.{rest}"
    for prefix in (deep[0] if deep else "midlayer.", "layers.0."):
        if name.startswith(prefix):
            return first + name.removeprefix(prefix)
    return name
