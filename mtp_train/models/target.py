"""Load a target that a team already serves, frozen, with its attention routed through our contexts.

The forward is transformers' own; what is ours is the ragged batch and the call's context. Knows no head.

Shapes: T rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig

from mtp_train.attention import interface
from mtp_train.core.errors import UserError
from mtp_train.core.provenance import digest
from mtp_train.models.accounting import require_accounted
from mtp_train.models.folder import (
    require_config_folder,
    require_model_folder,
    weights_digest,
)
from mtp_train.models.identity import (
    Identity,
    config_identity,
    end_tokens,
    folder_identity,
)
from mtp_train.models.packed import pack_linears
from mtp_train.models.partial import ends_only
from mtp_train.models.quantised import (
    NONE,
    folder_quantisation,
    loading,
    require_plain_ends,
    require_quantisation,
)

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "gpt_oss",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


POST_NORM = "post_norm"  # what `forward` returns; the lm_head's input
PRE_NORM = "pre_norm"


class Target:
    """A frozen causal language model: ragged rows in, post-final-norm states out.

    `state` names what `forward` returns, and `quantisation` what its matrices were made of (see `quantised`), as stores
    and heads record them.
    """

    state = POST_NORM

    def __init__(
        self,
        model: nn.Module,
        path: Path | None = None,
        tensor_parallel: int = 1,
        quantisation: str = NONE,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        pack_linears(self.model)
        self.path = path
        self.quantisation = quantisation
        self.chat_template_kwargs: dict[str, Any] = {}  # what its text is rendered with
        self.tensor_parallel = tensor_parallel
        self.config: PreTrainedConfig = cast(Any, model).config
        self.base: Any = cast(Any, model).base_model
        require_architecture(self.config)

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str = "bfloat16",
        *,
        device: str = "cpu",
        trust_remote_code: bool = False,
        tensor_parallel: int = 1,
        ends: bool = False,
        quantisation: str = NONE,
    ) -> Target:
        """Load from a local folder of safetensors.

        Args:
            dtype: one of `DTYPES`; bfloat16 is what engines serve, float32 is for exact comparisons.
            tensor_parallel: ranks of this process's group that hold the target together, by transformers' own plan.
            ends: keep only what training on stored states needs; a forward then reads the layers from the files (see
                `partial`). A quantised target is loaded whole.
            quantisation: how a plain folder's matrices are quantised now: none, or one of `quantised.TORCHAO`.
        """
        folder = require_model_folder(path)
        require_quantisation(quantisation)
        name, wanted = interface.register(), require_dtype(dtype)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            require_architecture(config)
            require_accounted(folder, config, device, trust_remote_code=trust_remote_code)
            quantised, asked = loading(config, quantisation, device)
            if tensor_parallel > 1:
                _require_plain(quantised, tensor_parallel)
            spread = _spread(config, tensor_parallel) if tensor_parallel > 1 else {}
            if ends and quantised == NONE:
                places = ends_only(config, device, trust_remote_code=trust_remote_code)
                spread = {"device_map": places} if places else {}
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=wanted,
                attn_implementation=name,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                **spread,
                **asked,
            )
            require_plain_ends(model)
        except UserError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                "a target folder must hold a whole model that transformers knows",
                f"{folder}: {error}",
                "copy the files again, or choose another target",
            ) from error
        placed = model if spread else cast(nn.Module, model).to(device)
        return cls(placed, folder, tensor_parallel, quantised)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> Target:
        """A randomly initialised target: toy models for exact arithmetic."""
        require_architecture(config)
        config = copy.deepcopy(config)
        config._attn_implementation = interface.register()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=config._attn_implementation
            )
        return cls(model)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, context: interface.AttentionContext
    ) -> Tensor:
        """Post-final-norm states [T, D] of one ragged batch."""
        out = self.base(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            attention_context=context,
        )
        return out.last_hidden_state.squeeze(0)

    def capture(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        context: interface.AttentionContext,
        states: Sequence[str],
    ) -> dict[str, Tensor]:
        """The named states [T, D] of one ragged batch, from one forward. See `layer_of` for the names."""
        wanted = {name: layer_of(name, self.layers) for name in states if name != POST_NORM}
        with self._entering(set(wanted.values())) as seen:
            last = self.forward(tokens_T, positions_T, context)
        return {name: last if name == POST_NORM else seen[wanted[name]] for name in states}

    @contextmanager
    def _entering(self, numbers: set[int]) -> Iterator[dict[int, Tensor]]:
        """Collect what enters decoder layer k; k = number of layers is the final norm."""
        seen: dict[int, Tensor] = {}
        blocks = [*self.base.layers, self.base.norm]
        hooks = [
            blocks[number].register_forward_pre_hook(
                partial(_keep_input, seen, number), with_kwargs=True
            )
            for number in numbers
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head of post-norm states, capped where the target caps its logits: [..., D] -> [..., V]."""
        return self.capped(self.lm_head(hidden))

    def capped(self, logits: Tensor) -> Tensor:
        """What it makes of its lm_head's output."""
        return capped_logits(logits, self.config)

    def lm_head_rows(self, token_U: Tensor) -> nn.Module:
        """The lm_head of these tokens alone: a frozen copy of their rows, [..., D] -> [..., U].

        Where ranks hold the target together, all of them must ask, and each gets all of the rows.
        """
        with torch.inference_mode(False), torch.no_grad():
            weight = self.lm_head.weight.detach()
            whole_VD = weight.full_tensor() if isinstance(weight, DTensor) else weight
            rows_UD = nn.Parameter(whole_VD[token_U.to(whole_VD.device)], requires_grad=False)
            linear = nn.Linear(self.hidden_size, len(token_U), bias=False, device="meta")
            linear.weight = rows_UD
            made = nn.Sequential(linear)
            pack_linears(made)
        return made

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first decoder layer gets: [...] -> [..., D].

        Gemma's rows are sqrt(D) times those of its matrix, here and in serving engines, whose draft heads embed through
        the target as well.
        """
        return self.base.get_input_embeddings()(tokens)

    @property
    def lm_head(self) -> nn.Linear:
        head: nn.Linear = cast(Any, self.model).get_output_embeddings()
        return head

    @property
    def logit_softcap(self) -> float | None:
        return logit_softcap(self.config)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.weight.shape[0])

    @property
    def layers(self) -> int:
        return len(self.base.layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return _kv_heads(self.config) // self.tensor_parallel

    @property
    def head_width(self) -> int:
        """Of a key; latent attention's values are narrower."""
        return int(
            getattr(self.config, "qk_head_dim", None)
            or getattr(self.config, "head_dim", None)
            or self.hidden_size // self.config.num_attention_heads
        )

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @cached_property
    def hash(self) -> str:
        """Digest of the weights: heads and features are bound to it."""
        return target_hash(self.path, self.quantisation) if self.path else "unsaved"

    @property
    def identity(self) -> Identity:
        """What else heads and features are bound to, by name: config and text."""
        if self.path:
            return folder_identity(self.path, self.chat_template_kwargs)
        return config_identity(self.config, self.chat_template_kwargs)


def transformers_own(target: Target) -> nn.Module:
    """transformers' own model with its own attention: weights, dtype and quantisation of a target with a folder."""
    assert target.path is not None, "a toy has no folder"
    config = AutoConfig.from_pretrained(target.path)
    plain = target.quantisation == folder_quantisation(target.path)
    _, asked = loading(config, NONE if plain else target.quantisation, str(target.device))
    model = AutoModelForCausalLM.from_pretrained(
        target.path, config=config, dtype=target.dtype, **asked
    )
    return cast(nn.Module, model).to(target.device)


def config_values(config: PreTrainedConfig) -> dict[str, Any]:
    """A model's config as plain JSON values; `config_of` makes it again."""
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


def config_of(values: dict[str, Any]) -> PreTrainedConfig:
    """The config of `config_values`."""
    rest = {name: value for name, value in values.items() if name != "model_type"}
    return AutoConfig.for_model(values["model_type"], **rest)


def require_same_tokens(path: str | Path, other: str | Path) -> None:
    """Raise unless two model folders' tokenizers give every text the same ids."""
    known, found = (load_tokenizer(folder).get_vocab() for folder in (path, other))
    differ = [
        f"{token!r} {found.get(token)} for {known.get(token)}"
        for token in sorted(known.keys() | found.keys())
        if known.get(token) != found.get(token)
    ]
    if differ:
        raise UserError(
            "a draft model must have the target's vocabulary, every token with its id",
            f"{other} with {len(differ)} others: {', '.join(differ[:3])}",
            "choose a model of the target's family",
        )


def require_architecture(config: PreTrainedConfig) -> None:
    """Refuse what the forward, the head or the export would compute wrongly."""
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            "a target must be of a type that was tried: " + ", ".join(MODEL_TYPES),
            config.model_type,
            "choose another target",
        )
    for rope in rope_sets(config):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(
                "a target's RoPE must not depend on the batch's length: " + ", ".join(ROPE_TYPES),
                kind,
                "choose another target",
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise UserError(
            "a target must read from left to right",
            f"{config.model_type} with use_bidirectional_attention",
            "choose another target",
        )


def rope_sets(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of a target: one set, or one per layer type."""
    found = getattr(config, "rope_parameters", None) or {}
    return list(found.values()) if by_layer_type(config) else [found]


def by_layer_type(config: PreTrainedConfig) -> bool:
    """Whether layers of different types turn differently."""
    found = getattr(config, "rope_parameters", None) or {}
    return bool(found) and all(isinstance(value, dict) for value in found.values())


def logit_softcap(config: PreTrainedConfig) -> float | None:
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def capped_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """What the target makes of its lm_head's output."""
    cap = logit_softcap(config)
    return logits if cap is None else interface.soft_capped(logits, cap)


def layer_of(state: str, layers: int) -> int:
    """The decoder layer that the named state enters; `layers` means the final norm.

    `layer_<k>` is the residual stream after k decoder layers (0: the embeddings), which is how vLLM counts auxiliary
    layers; `pre_norm` is the stream after all of them.
    """
    match = re.fullmatch(r"layer_(\d+)", state)
    number = layers if state == PRE_NORM else int(match[1]) if match else -1
    if not 0 <= number <= layers:
        raise UserError(
            f"a state must be {POST_NORM}, {PRE_NORM} or layer_0 to layer_{layers}",
            state,
            "correct precompute.states",
        )
    return number


def eagle3_states(layers: int) -> tuple[str, ...]:
    """Three auxiliary states for an EAGLE-3 head: low, middle and high.

    vLLM's default ids (2, n // 2, n - 3), where they are three of rising order; evenly spread on shallow targets.
    """
    usual = (2, layers // 2, layers - 3)
    shallow = (layers // 4, layers // 2, layers - layers // 4)
    chosen = usual if usual[0] < usual[1] < usual[2] else shallow
    if len(set(chosen)) < 3:
        raise UserError(
            "three auxiliary states need a target of 2 layers or more", layers, "name the states"
        )
    return tuple(f"layer_{number}" for number in chosen)


def spread_states(layers: int, count: int) -> tuple[str, ...]:
    """`count` states of a target, spread evenly from behind its second layer to its third from last, as DFlash's."""
    if count == 1:
        return (f"layer_{max(layers - 2, 1)}",)
    ids = [round(1 + place * (layers - 4) / (count - 1)) for place in range(count)]
    if layers < 4 or len(set(ids)) < count:
        ids = [round(place * (layers - 1) / (count - 1)) for place in range(count)]
    if len(set(ids)) < count:
        raise UserError(
            f"{count} states need a target of {count} layers or more",
            layers,
            "lower head.target_states, or name head.states",
        )
    return tuple(f"layer_{number + 1}" for number in ids)


def _keep_input(
    seen: dict[int, Tensor],
    number: int,
    _module: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
) -> None:
    """A forward pre-hook: remember the hidden states [1, T, D] that enter a module, as [T, D]."""
    seen[number] = (args[0] if args else kwargs["hidden_states"]).squeeze(0)


def _kv_heads(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _spread(config: PreTrainedConfig, size: int) -> dict[str, Any]:
    """How transformers shards the model over the `size` ranks of this process's group."""
    heads = {"attention": config.num_attention_heads, "key/value": _kv_heads(config)}
    uneven = [f"{count} {name} heads" for name, count in heads.items() if count % size]
    if uneven:
        raise UserError(
            f"a target's heads must divide by tensor_parallel {size}",
            " and ".join(uneven),
            "choose another number",
        )
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def _require_plain(quantised: str, size: int) -> None:
    if quantised != NONE:
        raise UserError(
            "a quantised target is held whole by each rank",
            f"{quantised} with tensor_parallel {size}",
            "set tensor_parallel to 1, or take the plain weights",
        )


def target_hash(path: str | Path, quantisation: str = NONE) -> str:
    """Digest of a target folder's weight files, and of how they are quantised when loaded (16 hex digits)."""
    folder = require_model_folder(path)
    files = weights_digest(folder)
    as_they_are = quantisation in (NONE, folder_quantisation(folder))
    return files if as_they_are else digest([files, quantisation])


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in the target's folder."""
    folder = require_config_folder(path)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            "a target folder must hold its tokenizer",
            f"{folder}: {error}",
            "copy the tokenizer files into it",
        ) from error


def stop_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> frozenset[int]:
    """Tokens that end an answer in serving: the tokenizer's end and those that the folder's configs name."""
    own = tokenizer.eos_token_id
    named = end_tokens(folder) if folder is not None else []
    return frozenset([*named, *([] if own is None else [int(own)])])


def require_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config's name."""
    if name not in DTYPES:
        raise UserError("a dtype must be one of " + ", ".join(DTYPES), name, "choose one of them")
    return DTYPES[name]
