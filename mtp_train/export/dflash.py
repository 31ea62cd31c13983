"""The DFlash layout: a `dflash` head for vLLM (0.32, `models/qwen3_dflash.py`), and the DSpark layout on top of it.

    c      = rms(fc([g1 | .. | gn])) * hidden_norm      of the text's rows before the anchor
    rows   = embedding of [x[a], mask, mask, ..]        at positions a, a + 1, ..
    layer  : k, v = k_proj, v_proj of [c ; input_layernorm(rows)], q of the rows alone; norms on heads of q and k; RoPE;
             every row sees all of both (under a window, those of so many positions)
    logits = target's lm_head(norm(rows)), slot 1 first; DSpark: slot 0 first, plus markov_w2 markov_w1[token before]

Target layers are counted from 0 by the layer that has run: our state `layer_k` is id k - 1, and vLLM adds 1. DSpark's
keys stand at the top level (`models/qwen3_dspark.py`), DFlash's in `dflash_config`. Without a word about it vLLM and
SGLang make layers with a window causal: `is_causal` is always written.

Folders of speculators (`models/dflash`, `models/dspark`) have the same tensors; their layer stands in
`transformer_layer_config`, and `aux_hidden_state_layer_ids` counts the layers that have run.

Knows tensors and config keys only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.export import llama
from mtp_train.export.layout import Chain, Layout, Serving, cast, require_tensors
from mtp_train.export.reference import Layer, turned
from mtp_train.export.speculators import KIND, LAYER
from mtp_train.heads.base import DraftHead
from mtp_train.heads.dflash import DFlashConfig, DFlashHead
from mtp_train.heads.dspark import DSparkConfig, DSparkHead
from mtp_train.models.plain import rotary_table
from mtp_train.models.target import POST_NORM, Target, layer_of

IDS, MASK, NESTED = "target_layer_ids", "mask_token_id", "dflash_config"
TEMPERATURES = "temperatures"  # of the head; no engine reads a name for them yet
MARKOV_1, MARKOV_2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
SURE = "confidence_head.proj"
FITTED = "confidence_temperatures"
CAUSAL, SLIDING = "is_causal", "sliding_attention"
NUMBERED = "aux_hidden_state_layer_ids"  # speculators' name for the target's layers
# What engines compute otherwise where a config says anything else.
PLAIN: dict[str, Any] = {
    "attention_value_scale": 1.0,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "use_aux_hidden_state": True,
}


class DFlash(Layout):
    """`dflash`."""

    name = "dflash"
    family = DFlashHead.family
    architecture = "DFlashDraftModel"
    windows = True
    needs: ClassVar[tuple[str, ...]] = (
        "fc.weight",
        "hidden_norm.weight",
        "layers.0.self_attn.k_norm.weight",
    )
    never: ClassVar[tuple[str, ...]] = ("markov_head.*", "midlayer.*", "mask_hidden")
    head_class: type[Any] = DFlashHead
    config_class: type[Any] = DFlashConfig
    plain: ClassVar[dict[str, Any]] = PLAIN | {"sample_from_anchor": False}

    def head_faults(self, config: Any) -> Iterator[str]:
        if POST_NORM in config.states:
            yield f"head.states with {POST_NORM} (engines give states without the final norm)"

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        yield from llama.embedding_faults(target)
        yield from llama.output_faults(target)
        if getattr(target.config, "hidden_act", "silu") != "silu":
            yield f"hidden_act {target.config.hidden_act}"
        ids = [layer_of(name, target.layers) for name in config.states]
        if ids != sorted(set(ids)) or 0 in ids:
            yield f"head.states {config.states} (engines give what layers have put out, in order)"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        return cast(self._state(head), dtype)

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        own = head.config
        sizes = llama.dimensions(target, own.layer)
        sizes.pop("mlp_bias")
        window = own.window or None
        kind = "sliding_attention" if window else "full_attention"
        return sizes | {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "num_hidden_layers": own.layers,
            "num_target_layers": target.layers,
            "layer_types": [kind] * own.layers,
            "use_sliding_window": bool(window),
            "sliding_window": window,
            "block_size": own.block_size,
            CAUSAL: False,
            **self._said(head, target),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") == [self.architecture]

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        config = _without_speculators(config)
        said = {**config, **(config.get(NESTED) or {})}
        self._require_plain(said)
        window, causal = attention(config)
        if causal:
            rule = "a block head's rows must see each other"
            raise UserError(rule, "causal layers", "this kind is not trained or run here")
        settings = self.config_class(
            layers=1 + max(int(name.split(".")[1]) for name in tensors if name[:7] == "layers."),
            block_size=_number(said, "block_size", self.head_class.first_slot + 1, None),
            states=[f"layer_{number + 1}" for number in _layers_read(said, target)],
            target_states=len(said[IDS]),
            window=window,
            mask_token=_number(said, MASK, 0, target.vocab_size),
            layer=llama.read_layer({"mlp_bias": False, **config}, target),
            **self._read_settings(tensors, config),
        )
        head: DraftHead = self.head_class(target, settings)
        ours = self._state(head)
        require_tensors(tensors, ours)
        head.load_state_dict({name: tensors[name].float() for name in ours}, strict=False)
        self._finish(head, config)
        return head

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        numbered = {layer_of(name, chain.target.layers): v for name, v in chain.states.items()}
        ids = {**config, **(config.get(NESTED) or {})}[IDS]
        states = torch.cat([numbered[number + 1] for number in ids], dim=-1)
        outer = Layer(tensors, config, "")
        context = outer.norm("hidden_norm.weight", states @ tensors["fc.weight"].T)
        text = chain.token_N[: chain.rows + 1]
        mask = {**config, **(config.get(NESTED) or {})}[MASK]
        token_B = torch.full((config["block_size"],), mask)
        token_B[0] = text[-1]
        rows = chain.target.embed(token_B.to(chain.target.device)).float().cpu()
        before = chain.start + torch.arange(chain.rows)
        place = chain.start + chain.rows + torch.arange(len(token_B))
        for number in range(config["num_hidden_layers"]):
            layer = Layer(tensors, config, f"layers.{number}.")
            rows = _layer(layer, rows, place, context, before)
        read = outer.norm("norm.weight", rows)
        return self._logits(tensors, chain, read)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        drafts = config.block_size - DFlashHead.first_slot
        how = llama.vllm("dflash", target, head, drafts)
        if config.layers > 1:
            how += (
                "\n\nOn a CPU, vLLM 0.32's `rms_norm` takes the first layer's norm of keys for the text's rows in all "
                "layers: drafts of this head are worse there than here."
            )
        sglang = f"""```
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {head} --speculative-num-draft-tokens {config.block_size}
```"""
        if config.window:
            sglang = (
                "Its DFlash model makes layers with a window causal, which this head's are not."
            )
        return [
            Serving("vLLM, method `dflash`", "0.32.0, CPU build", config.layers == 1, how),
            Serving("SGLang, algorithm `DFLASH`", "mid 2026", False, sglang),
        ]

    def tidied(self, tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
        if "d2t" in tensors:
            rule = f"a block head must draft all {target.vocab_size} tokens"
            received = f"d2t, which names {len(tensors['d2t'])} of them"
            raise UserError(rule, received, "this kind is not trained or run here")
        return llama.tidied(tensors, target, shared_lm_head=True)

    def _require_plain(self, said: Mapping[str, Any]) -> None:
        """Raise if a config says what engines compute and this head does not."""
        odd = {
            key: said[key]
            for key, value in self.plain.items()
            if said.get(key) is not None and said[key] != value
        }
        if odd:
            wanted = ", ".join(f"{key} {self.plain[key]}" for key in odd)
            received = ", ".join(f"{key} {value}" for key, value in odd.items())
            rule = f"a {self.family} head must be computed as here, with {wanted}"
            raise UserError(rule, received, "this kind is not trained or run here")

    def _state(self, head: DraftHead) -> dict[str, Tensor]:
        return {name: value for name, value in head.state_dict().items() if name != TEMPERATURES}

    def _said(self, head: DraftHead, target: Target) -> dict[str, Any]:
        window = head.config.window
        return {
            NESTED: {
                MASK: head.config.mask_token,
                IDS: [layer_of(name, target.layers) - 1 for name in head.states],
                "causal": False,
                "use_swa": bool(window),
                "swa_window_size": window or None,
            }
        }

    def _read_settings(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {}

    def _finish(self, head: DraftHead, config: Mapping[str, Any]) -> None:
        pass

    def _logits(self, tensors: Mapping[str, Tensor], chain: Chain, read_BD: Tensor) -> list[Tensor]:
        return [chain.lm_head(read_BD[1 + step].unsqueeze(0))[0] for step in range(chain.steps)]


class DSpark(DFlash):
    """`dspark`."""

    name = "dspark"
    family = DSparkHead.family
    architecture = "Qwen3DSparkModel"
    needs: ClassVar[tuple[str, ...]] = (*DFlash.needs, MARKOV_1, f"{SURE}.weight")
    never: ClassVar[tuple[str, ...]] = ()
    head_class = DSparkHead
    config_class = DSparkConfig
    plain: ClassVar[dict[str, Any]] = PLAIN | {
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        how = llama.vllm("dspark", target, head, config.block_size)
        how += "\n\nRead in vLLM's source only: its model runner for this method needs a GPU."
        return [Serving("vLLM, method `dspark`", "0.32.0, from its source", False, how)]

    def _said(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert head.temperatures is not None
        return {
            MASK: head.config.mask_token,
            IDS: [layer_of(name, target.layers) - 1 for name in head.states],
            "markov_rank": head.config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            FITTED: head.temperatures.float().tolist(),
        }

    def _read_settings(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {"markov_rank": tensors[MARKOV_1].shape[1]}

    def _finish(self, head: DraftHead, config: Mapping[str, Any]) -> None:
        fitted, count = config.get(FITTED), head.config.block_size
        if fitted is None or head.temperatures is None:
            return
        if len(fitted) != count or not all(value > 0 for value in fitted):
            rule = f"{FITTED} must be a number above 0 for each of {count} drafts"
            raise UserError(rule, fitted, "export the head again")
        head.temperatures.copy_(torch.tensor(fitted))

    def _logits(self, tensors: Mapping[str, Tensor], chain: Chain, read_BD: Tensor) -> list[Tensor]:
        found = []
        for step in range(chain.steps):
            before_R = tensors[MARKOV_1][chain.token_N[chain.rows + step]]
            logits_V = chain.lm_head(read_BD[step].unsqueeze(0))[0]
            found.append(logits_V + tensors[MARKOV_2] @ before_R)
        return found


def _layer(
    layer: Layer, rows_BD: Tensor, place_B: Tensor, context_TD: Tensor, before_T: Tensor
) -> Tensor:
    """A decoder layer over a block [B, D] and the text's rows before it."""
    config, prefix = layer.config, layer.prefix
    width, groups = config["head_dim"], config["num_key_value_heads"]
    normed = layer.norm(f"{prefix}input_layernorm.weight", rows_BD)
    whole, position = torch.cat([context_TD, normed]), torch.cat([before_T, place_B])

    def heads(name: str, rows: Tensor, at: Tensor) -> Tensor:
        """[N, T, H], turned; values are neither normed nor turned."""
        parts = layer.linear(f"self_attn.{name}_proj", rows).unflatten(-1, (-1, width))
        if name != "v":
            parts = layer.norm(f"{prefix}self_attn.{name}_norm.weight", parts)
        parts = parts.transpose(0, 1)
        return parts if name == "v" else turned(parts, rotary_table(config, at))

    query = heads("q", normed, place_B)
    key, value = heads("k", whole, position), heads("v", whole, position)
    repeat = len(query) // groups
    score = query @ key.repeat_interleave(repeat, 0).transpose(1, 2) / width**0.5
    window, causal = attention(config)
    if window:
        far = position.unsqueeze(0) <= place_B.unsqueeze(1) - window
        score = score.masked_fill(far, float("-inf"))
    if causal:
        later = position.unsqueeze(0) > place_B.unsqueeze(1)
        score = score.masked_fill(later, float("-inf"))
    mixed = score.softmax(-1) @ value.repeat_interleave(repeat, 0)
    rows_BD = rows_BD + layer.linear("self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
    normed = layer.norm(f"{prefix}post_attention_layernorm.weight", rows_BD)
    return rows_BD + layer.mlp(normed)


def attention(config: Mapping[str, Any]) -> tuple[int, bool]:
    """What vLLM makes of a config.json: positions that a row sees (0: all), and whether it sees no later ones.

    Raises:
        UserError: layers that differ, or a window without a size.
    """
    nested, kinds = config.get(NESTED) or {}, set(config.get("layer_types") or [])
    if len(kinds) > 1:
        rule = "a block head's layers must all have one window"
        raise UserError(rule, sorted(kinds), "this kind is not trained or run here")
    explicit = [config.get(CAUSAL), nested.get("causal")]
    causal = next((said for said in explicit if said is not None), SLIDING in kinds)
    if SLIDING not in kinds and not nested.get("use_swa"):
        return 0, bool(causal)
    window = nested.get("swa_window_size", config.get("sliding_window"))
    if not isinstance(window, int) or window < 1:
        rule = "a block head with a window must say its size as sliding_window"
        raise UserError(rule, window, "write it into config.json")
    return window, bool(causal)


def _without_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of speculators with its keys where vLLM has them; any other as it is.

    There a window's layers are causal unless it says otherwise; layers without one never are.
    """
    if KIND not in config:
        return dict(config)
    layer = config[LAYER]
    sliding = SLIDING in (layer.get("layer_types") or [])
    beside = {key: value for key, value in config.items() if key not in (LAYER, "architectures")}
    said: dict[str, Any] = {CAUSAL: sliding and not config.get("sliding_window_non_causal", False)}
    if isinstance(config.get(NUMBERED), list):
        said[IDS] = [number - 1 for number in config[NUMBERED]]
    said["sample_from_anchor"] = bool(config.get("sample_from_anchor", False))
    return {**layer, **beside, **said}


def _layers_read(said: Mapping[str, Any], target: Target) -> list[int]:
    """The target's layers whose output is read, counted from 0, in the order in which engines give them."""
    ids = said.get(IDS)
    if not isinstance(ids, list) or not ids:
        rule = f"a block head's config.json must name the target's layers as {IDS}"
        raise UserError(rule, ids or "none", "write them there")
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < target.layers:
        rule = f"{IDS} must rise, from 0 to {target.layers - 1} at most"
        raise UserError(rule, ids, "use the head's own target")
    return ids


def _number(said: Mapping[str, Any], key: str, least: int, below: int | None) -> int:
    found = said.get(key)
    if not isinstance(found, int) or found < least or (below is not None and found >= below):
        span = f"from {least}" + ("" if below is None else f" to {below - 1}")
        rule = f"a block head's config.json must name its {key}, {span}"
        raise UserError(rule, "none" if found is None else found, "write it there")
    return found
