"""The peer's side of tools/bench_trainer.py: a training step of speculators' MTP draft model, as its trainer makes it.

Runs in an environment of its own (tools/setup_peer.sh) and imports nothing of mtp_train. The model is built the way
speculators' command builds a fresh one: float32 parameters, the target's embedding and lm_head frozen among them. Its
trainer would keep the logits of one step until the next forward is over; here they are let go, in its favour.

    python tools/sides/speculators_mtp.py SPEC        SPEC as bench_trainer.write_spec makes it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from protocol import serve
from safetensors import safe_open
from safetensors.torch import load_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    model = build(spec)
    batch = load_batch(spec)
    options, _ = MTPDraftModel.get_trainer_kwargs(num_speculative_steps=spec["steps"])
    optimizer = torch.optim.AdamW(
        model.named_parameters(), lr=spec["learning_rate"], weight_decay=0.01
    )

    def step() -> float:  # in the order of speculators.train.trainer
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    rows = sum(spec["documents"])
    serve(step, trained=spec["steps"] * (rows - spec["steps"] - 1))


def build(spec: dict[str, Any]) -> MTPDraftModel:
    """A fresh model; Qwen3's is the plainest of the layers that it knows for MTP."""
    layer = Qwen3Config(**{name: spec["config"][name] for name in DIMENSIONS}, num_hidden_layers=1)
    proposal = GreedyTokenProposalConfig(speculative_tokens=spec["steps"])
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config).train()
    del model.verifier_lm_head  # as its `load_verifier_weights` does
    with torch.no_grad():
        fill(model, spec["target"])
    return model


def fill(model: MTPDraftModel, target: str | None) -> None:
    """The target's embedding and lm_head; random ones where it has no folder."""
    if target is None:
        for module in (model.embed_tokens, model.lm_head):
            module.weight.normal_(std=0.02)
        return
    with safe_open(Path(target) / "model.safetensors", framework="pt") as tensors:
        embedding = tensors.get_tensor(EMBEDDING)
        model.embed_tokens.weight.copy_(embedding)
        tied = LM_HEAD not in set(tensors.keys())
        model.lm_head.weight.copy_(embedding if tied else tensors.get_tensor(LM_HEAD))


def load_batch(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Documents end to end, positions anew in each: what its collate function makes of them."""
    rows = load_file(spec["rows"])
    positions = torch.cat([torch.arange(length) for length in spec["documents"]])
    return {
        "input_ids": rows["token"].unsqueeze(0),
        "hidden_states": rows["state"].unsqueeze(0),
        "loss_mask": torch.ones_like(rows["token"]).unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
    }


if __name__ == "__main__":
    main()
