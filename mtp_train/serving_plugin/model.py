"""An `mtp` head as a vLLM model: one or more modules, each with those of its norms that it was trained with.

    out = final_norm(block(eh_proj([enorm(e) | hnorm(h)])))     e: zero at position 0

Which module a call runs is `spec_step_idx`'s; who calls with which rows is the proposer's. Runs in vLLM's environment.

Shapes: T rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

MAPPER = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0),
        ".up_proj": (".gate_up_proj", 1),
    },
    orig_to_new_prefix={"modules.": "model.layers."},
)


class Module(nn.Module):
    """One module, its decoder layers numbered from `first` on."""

    def __init__(self, vllm_config: VllmConfig, config: Any, prefix: str, first: int) -> None:
        super().__init__()
        width = config.hidden_size

        def norm(name: str) -> nn.Module:
            wanted = name in config.norms
            return RMSNorm(width, eps=config.rms_norm_eps) if wanted else nn.Identity()

        self.enorm = norm("enorm")
        self.hnorm = norm("hnorm")
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block: Any = LlamaDecoderLayer(vllm_config, prefix=f"{prefix}.{first}", config=config)
        if "input_norm" not in config.norms:
            self.block.input_layernorm = nn.Identity()
        layers = getattr(config, "module_layers", 1)  # folders of earlier versions don't say
        self.later_blocks = nn.ModuleList(
            LlamaDecoderLayer(vllm_config, prefix=f"{prefix}.{first + at}", config=config)
            for at in range(1, layers)
        )
        self.final_norm = norm("final_norm")

    def forward(self, embedding_TD: Tensor, state_TD: Tensor, position_T: Tensor) -> Tensor:
        embedding_TD = torch.where(position_T.unsqueeze(-1) == 0, 0, embedding_TD)
        halves = torch.cat([self.enorm(embedding_TD), self.hnorm(state_TD)], dim=-1)
        rows_TD, residual_TD = self.block(position_T, self.eh_proj(halves), None)
        for block in self.later_blocks:
            rows_TD, residual_TD = block(position_T, rows_TD, residual_TD)
        out: Tensor = self.final_norm(residual_TD + rows_TD)
        return out


class Modules(nn.Module):
    """The modules, and the embedding, which is the target's: vLLM puts it here."""

    def __init__(self, vllm_config: VllmConfig, config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        # vLLM sorts its caches by the number in a layer's name: ours follow the target's.
        layers = getattr(config, "module_layers", 1)
        first = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.layers = nn.ModuleList(
            Module(vllm_config, config, f"{prefix}.layers", first + depth * layers)
            for depth in range(config.num_nextn_predict_layers)
        )


class MtpTrainMtp(nn.Module):
    """The draft model. Its config is the head's own, not the target's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.model = Modules(vllm_config, self.config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.mtp_train_depths = len(self.model.layers)  # read by the proposer

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor:
        """The output [T, D] of the module of draft step `spec_step_idx`; the last one serves all later steps."""
        embedding_TD = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        module = self.model.layers[min(spec_step_idx, self.mtp_train_depths - 1)]
        out: Tensor = module(embedding_TD, hidden_states, positions)
        return out

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Every tensor of the layout, or an error: embedding and lm_head are the target's."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=MAPPER)
        own = {name for name, _ in self.named_parameters() if name.startswith("model.layers.")}
        missing = sorted(own - loaded)
        if missing:
            raise ValueError(
                f"the head's folder must hold every tensor of its modules: no {missing}"
            )
        return loaded
