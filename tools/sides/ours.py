"""Our side of tools/bench_trainer.py: a training step of the `mtp` head, as `train.loop` makes it.

python tools/sides/ours.py SPEC rows          write the batch of both sides: tokens, and the target's states of them
python tools/sides/ours.py SPEC kl|hard_ce    serve steps with this loss
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from protocol import serve
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mtp_train.attention.packed import PackedContext
from mtp_train.batches.pack import Pack
from mtp_train.heads.mtp import MtpConfig, build
from mtp_train.losses.terms import LossConfig
from mtp_train.models.target import POST_NORM, Target
from mtp_train.train.optim import make_optimizer
from mtp_train.train.step import RolloutModule

LOSSES = {
    "kl": LossConfig(),
    "hard_ce": LossConfig({"hard_ce": 1.0}, step_weights="fastmtp"),
}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    target = load_target(spec)
    if sys.argv[2] == "rows":
        write_rows(target, spec)
    else:
        train(target, spec, LOSSES[sys.argv[2]])


def train(target: Target, spec: dict[str, Any], loss: LossConfig) -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    head = build(target, MtpConfig())
    optimizer = make_optimizer(head, spec["learning_rate"], (0.9, 0.95), 0.01)
    module, optimizer = accelerator.prepare(RolloutModule(head, target, loss=loss), optimizer)
    pack = load_pack(spec)
    chains = chains_by_step(spec)

    def step() -> float:
        with accelerator.autocast():
            result = module(pack, spec["steps"])
        value = result.values.loss / chains[0]
        accelerator.backward(value)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    serve(step, trained=sum(chains))


def load_target(spec: dict[str, Any]) -> Target:
    if spec["target"] is not None:
        return Target.load(spec["target"])
    return Target.from_config(LlamaConfig(**spec["config"]), dtype=torch.bfloat16)


@torch.inference_mode()
def write_rows(target: Target, spec: dict[str, Any]) -> None:
    """Random tokens, in documents, and the states that the target gives them."""
    torch.manual_seed(0)
    offsets = offsets_of(spec)
    token = torch.randint(target.vocab_size, (offsets[-1],))
    position = torch.cat([torch.arange(length) for length in spec["documents"]])
    state = target.forward(token, position, PackedContext(offsets))
    save_file({"token": token, "state": state.contiguous()}, spec["rows"])


def load_pack(spec: dict[str, Any]) -> Pack:
    rows = load_file(spec["rows"])
    offsets = offsets_of(spec)
    keys = tuple(str(number) for number in range(len(offsets) - 1))
    return Pack(
        keys, offsets, rows["token"], torch.ones_like(rows["token"]), {POST_NORM: rows["state"]}
    )


def chains_by_step(spec: dict[str, Any]) -> list[int]:
    """How many predictions each draft step makes (see `batches.align`)."""
    return [
        sum(max(length - 2 - step, 0) for length in spec["documents"])
        for step in range(spec["steps"])
    ]


def offsets_of(spec: dict[str, Any]) -> tuple[int, ...]:
    return (0, *accumulate(spec["documents"]))


if __name__ == "__main__":
    main()
