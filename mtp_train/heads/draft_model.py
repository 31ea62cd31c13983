"""The `draft_model` head: a small causal LM of the target's vocabulary, for draft-target decoding (arXiv 2211.17192).

    out    = model([x[0] .. x[p]])[p]         the model's own embedding, layers and final norm
    logits = lm_head(out)                     its own, for x[p+1]

Row p reads token x[p] at position p and no state of the target's: its output stands where the target's H[p] does
(`ahead` = 0). Its first draft step is plain teacher forcing, and so are the later ones, since a draft that is worth
anything is the token of the text. Training trains the first.

Knows no attention context's insides and shifts nothing.

Shapes: T rows, E the model's width, V the target's vocabulary, U what both vocabularies hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.attention.interface import AttentionContext
from mtp_train.core.errors import UserError
from mtp_train.heads.block import Rotary
from mtp_train.heads.chain import ChainHead
from mtp_train.models.quantised import packed_matrices
from mtp_train.models.sizes import folder_config
from mtp_train.models.target import Target, config_of, config_values, require_same_tokens


@dataclass(frozen=True)
class DraftModelConfig:
    """Which model is trained.

    Attributes:
        path: its folder: safetensors, config and tokenizer.
        freeze_embedding: its embedding and lm_head stay as they are.
        model: its config, read from `path`; without a path a model of this config begins with random weights.
        source: digest of the weights in `path`; if given, no other weights are taken.
    """

    family: str = "draft_model"
    path: str = ""
    freeze_embedding: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    source: str = ""


class DraftModelHead(ChainHead):
    """One draft model. Build it with `build`; its parameters start in float32.

    Vocabularies may be padded to different sizes: rows past the target's are not read, and a smaller one drafts what
    it has.

    Args:
        config: with its `model`.
        model: it, with weights; none: made of `config.model`, at random.
    """

    family = "draft_model"
    ahead = 0

    def __init__(
        self, target: Target, config: DraftModelConfig, model: Target | None = None
    ) -> None:
        model = model or Target.from_config(config_of(config.model))
        both = min(model.vocab_size, target.vocab_size)
        super().__init__(
            config,
            states=(),
            vocabulary_U=torch.arange(both) if both < target.vocab_size else None,
        )
        self.cache_layers = model.layers
        self.rows = both
        self.base: Any = model.base
        self.base.rotary_emb = Rotary(model)
        for index, layer in enumerate(self.base.layers):
            layer.self_attn.layer_idx = target.layers + index  # its place in the paged cache
        embedding = self.base.get_input_embeddings()
        tied = model.lm_head.weight is embedding.weight
        self.lm_head: nn.Linear | None = None if tied else model.lm_head
        self.requires_grad_(True)
        if config.freeze_embedding:
            embedding.requires_grad_(False)
            self.own_parameter().requires_grad_(False)
        self.float()

    def embed(self, target: Target, token_T: Tensor) -> Tensor:
        # A target may say a token of its padding, which no text has.
        embedded: Tensor = self.base.get_input_embeddings()(token_T.clamp(max=self.rows - 1))
        return embedded

    def fuse(self, states: dict[str, Tensor]) -> Tensor:
        """Nothing."""
        return torch.empty(0)

    def forward(
        self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor, context: AttentionContext
    ) -> Tensor:
        """What the lm_head reads [T, E], for rows (x[p], -, p)."""
        out = self.base(
            inputs_embeds=embedding_TD.unsqueeze(0),
            position_ids=position_T.unsqueeze(0),
            use_cache=False,
            attention_context=context,
        )
        last: Tensor = out.last_hidden_state.squeeze(0)
        return last

    @property
    def positions(self) -> int:
        return positions(self.config)

    def require_rollout(self, steps: int) -> None:
        if steps != 1:
            rule = "train.rollout_steps must be 1 for a draft_model: later steps would repeat the first"
            raise UserError(rule, steps, "set it to 1; any number of tokens can be drafted")

    def own_output(self) -> Tensor:
        return self.own_parameter()[: self.rows]

    def own_parameter(self) -> Tensor:
        module = self.lm_head or self.base.get_input_embeddings()
        weight: Tensor = module.weight
        return weight


def settle(config: DraftModelConfig) -> DraftModelConfig:
    """The configuration with the model's own, which is read from its folder."""
    if not config.path:
        return config
    return replace(config, model=config_values(folder_config(config.path)))


def positions(config: DraftModelConfig) -> int:
    """The longest sequence of a model of this config; 0 where there is none yet."""
    return int(config_of(config.model).max_position_embeddings) if config.model else 0


def build(target: Target, config: DraftModelConfig, seed: int = 0) -> DraftModelHead:
    """A model to train for `target`, in float32 on its device.

    Raises:
        UserError: no model is named, another than `config.source` says, or one of other tokens.
    """
    if config.path:
        model = _load(target, config)
        config = replace(config, model=config_values(model.config), source=model.hash)
    elif config.model:
        model = Target.from_config(config_of(config.model), seed=seed)
    else:
        raise UserError("head.path must be the folder of a draft model", "nothing", "name one")
    return DraftModelHead(target, config, model).to(target.device)


def _load(target: Target, config: DraftModelConfig) -> Target:
    model = Target.load(config.path, "float32")
    if packed_matrices(model.model):
        raise UserError(
            "a draft model must not be quantised: it is trained in float32",
            f"{config.path} with {model.quantisation}",
            "name the folder with its plain weights",
        )
    if config.source not in ("", model.hash):
        raise UserError(
            f"head.path must hold the weights of head.source {config.source}",
            model.hash,
            "name the folder that has them, or leave head.source empty",
        )
    if target.path is not None:
        require_same_tokens(target.path, config.path)
    return model
