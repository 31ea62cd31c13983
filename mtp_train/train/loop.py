"""The training loop: the same windows of packs on any number of ranks, exact resume, curves on disk.

Everything that decides a step is a pure function of its number (order, learning rate), so a checkpoint holds
parameters, Adam's moments and the step: nothing else. Loss is a mean over the global goals of a window.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from mtp_train.batches.pack import Features, epoch_packs, load_pack, ordered_packs
from mtp_train.checkpoint.heads import (
    TENSORS,
    HeadCard,
    find_checkpoints,
    load_tensors,
    read_card,
    save_checkpoint,
)
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import read_json
from mtp_train.heads.base import DraftHead
from mtp_train.losses.terms import LossConfig, default_weights
from mtp_train.losses.weights import denominator
from mtp_train.models.target import Target
from mtp_train.train.metrics import ValidationSums
from mtp_train.train.optim import learning_rate, load_optimizer, make_optimizer, optimizer_tensors
from mtp_train.train.step import RolloutModule

OPTIMIZER = "optimizer.safetensors"
CURVES = "curves.jsonl"


@dataclass(frozen=True)
class TrainConfig:
    """How a head is fitted.

    Attributes:
        epochs: passes over the features.
        rows: row budget of one pack (a micro-batch on one rank).
        accumulation: packs per rank and optimiser step.
        rollout_steps: draft steps trained: step 1 on the target's states, later ones on the head's own.
        step_weights, decay: geometric (each step `decay` times the one before it), fastmtp or uniform.
        loss: weights of loss terms by name (`losses.terms.TERMS`); 0 is off.
        lk_eta: the term `lk`'s own parameter.
        mean_over: tokens, or sequences: each trained token counts the same, or each sequence.
        loss_vocabulary: train on this many of the features' most frequent tokens, p and q renormalised there;
            0 is the whole vocabulary. Validation and the engine always use the whole.
        warm_start: a head's checkpoint to begin from, of the same family and options; empty: a fresh head.
        learning_rate, warmup_steps, beta1, beta2, weight_decay, clip: AdamW, cosine to 2 % of the peak.
        validations: how often in the run the held-out features are measured.
        checkpoints: how often in the run a resumable checkpoint is written; the newest two are kept.
    """

    epochs: int = 3
    rows: int = 512
    accumulation: int = 1
    rollout_steps: int = 3
    step_weights: str = "geometric"
    decay: float = 0.7
    loss: dict[str, float] = field(default_factory=default_weights)
    lk_eta: float = 3.0
    mean_over: str = "tokens"
    loss_vocabulary: int = 0
    warm_start: str = ""
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    validations: int = 6
    checkpoints: int = 4

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "rows",
            "accumulation",
            "rollout_steps",
            "validations",
            "checkpoints",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} must be 1 or more", getattr(self, name), "raise it")
        if self.learning_rate <= 0 or self.clip <= 0 or self.loss_vocabulary < 0:
            values = {
                key: getattr(self, key) for key in ("learning_rate", "clip", "loss_vocabulary")
            }
            raise UserError(
                "train.learning_rate and clip must be above 0, loss_vocabulary 0 or more",
                values,
                "raise it",
            )
        self.losses()  # refuses unknown terms and values out of range
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError(
                "train.beta1 and beta2 must lie in [0, 1)", (self.beta1, self.beta2), "use 0.9"
            )

    def losses(self) -> LossConfig:
        return LossConfig(self.loss, self.lk_eta, self.step_weights, self.decay, self.mean_over)


@dataclass(frozen=True)
class Window:
    """One optimiser step: this rank's packs. A pack with weight 0 only keeps ranks in step."""

    packs: tuple[tuple[list[int], float], ...]
    goals: int  # of all ranks: trained tokens, or sequences with any


def train(
    target: Target,
    head: DraftHead,
    features: Features,
    held_out: Features,
    config: TrainConfig,
    accelerator: Accelerator,
    out: Path,
) -> HeadCard:
    """Fit `head`; writes `out/head`, `out/curves.jsonl` and resumable checkpoints, and goes on from the newest one."""
    return _Trainer(target, head, features, held_out, config, accelerator, out).run()


class _Trainer:
    def __init__(
        self,
        target: Target,
        head: DraftHead,
        features: Features,
        held_out: Features,
        config: TrainConfig,
        accelerator: Accelerator,
        out: Path,
    ) -> None:
        for store in (features, held_out):
            contract = store.manifest.contract
            contract.require(target_hash=target.hash, hidden_size=target.hidden_size)
            contract.require_states(*dict.fromkeys((target.state, *head.states)))
        for name, store in (("features", features), ("held-out features", held_out)):
            if not store.manifest.loss_tokens:
                raise UserError(
                    "training needs tokens with loss",
                    f"none in the {name}",
                    "check the loss masks: no reply is trained",
                )
        self.target, self.head, self.features, self.held_out = target, head, features, held_out
        self.config, self.accelerator, self.out = config, accelerator, out
        self.lengths = features.lengths()
        self.loss_tokens = features.loss_tokens()
        self.epoch_windows = [self._windows(epoch) for epoch in range(config.epochs)]
        self.total = sum(len(windows) for windows in self.epoch_windows)
        optimizer = make_optimizer(
            head, config.learning_rate, (config.beta1, config.beta2), config.weight_decay
        )
        self._require_fit()
        vocabulary = self._vocabulary() if config.loss_vocabulary else None
        # unwrapped: validates without other ranks
        self.own = RolloutModule(head, target, vocabulary, config.losses())
        self.module, self.optimizer = accelerator.prepare(self.own, optimizer)
        self.raw_optimizer: torch.optim.Optimizer = getattr(
            self.optimizer, "optimizer", self.optimizer
        )
        self.step = 0
        self.curves: list[dict[str, Any]] = []

    @property
    def _packs_per_step(self) -> int:
        return self.config.accumulation * self.accelerator.num_processes

    def run(self) -> HeadCard:
        self._resume()
        validate_at = _marks(self.total, self.config.validations)
        save_at = _marks(self.total, self.config.checkpoints)
        if self.total <= self.config.warmup_steps and self.accelerator.is_main_process:
            steps = f"{self.total} steps, {self.config.warmup_steps} of them warm-up"
            say(f"train: only {steps}: this head will hardly have learnt anything")
        if self.step == 0:
            self._validate()
        with progress(
            self.total, "train", "step", initial=self.step, shown=self.accelerator.is_main_process
        ) as bar:
            for window in self._remaining():
                started = time.perf_counter()
                loss, norm, rate = self._optimize(window)
                self.step += 1
                self._log(
                    {
                        "step": self.step,
                        "loss": loss,
                        "gradient_norm": norm,
                        "learning_rate": rate,
                        "seconds": time.perf_counter() - started,
                    }
                )
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if self.step in validate_at:
                    self._validate()
                if self.step in save_at:
                    self._checkpoint()
        return self._finish()

    def _require_fit(self) -> None:
        """Refuse a configuration that this head can't be trained with."""
        head, config = self.head, self.config
        terms = ", ".join(config.losses().enabled("states"))
        if terms and head.own_output() is not None:
            rule = f"{terms}: states are compared only where the head shares the target's lm_head"
            raise UserError(rule, head.family, "set these weights of train.loss to 0")
        if config.loss_vocabulary and head.vocabulary is not None:
            rule = "train.loss_vocabulary is for heads without a draft vocabulary of their own"
            raise UserError(rule, config.loss_vocabulary, "set it to 0")
        if head.steps is not None and config.rollout_steps != head.steps:
            rule = f"train.rollout_steps must be {head.steps}, the draft steps of this {head.family} head"
            raise UserError(rule, config.rollout_steps, "change either")

    def _vocabulary(self) -> torch.Tensor:
        """The most frequent tokens of the features, in the order of their ids."""
        counts = self.features.token_counts()
        chosen = counts.argsort(descending=True, stable=True)[: self.config.loss_vocabulary]
        if self.accelerator.is_main_process:
            share = float(counts[chosen].sum() / counts.sum())
            say(f"train: the loss sees {len(chosen)} tokens, {share:.2%} of the text")
        return chosen.sort().values.to(self.target.device)

    # --- order ------------------------------------------------------------------------------------------------

    def _windows(self, epoch: int) -> list[Window]:
        """The epoch's optimiser steps; packs of a window go round robin over the ranks."""
        config, world = self.config, self.accelerator.num_processes
        packs = epoch_packs(self.lengths, config.rows, config.seed, epoch)
        windows = []
        for start in range(0, len(packs), self._packs_per_step):
            members = [(pack, 1.0) for pack in packs[start : start + self._packs_per_step]]
            real = [pack for pack, _ in members]
            members += [(members[0][0], 0.0)] * (-len(members) % world)
            windows.append(
                Window(tuple(members[self.accelerator.process_index :: world]), self._goals(real))
            )
        return windows

    def _goals(self, packs: list[list[int]]) -> int:
        """The denominator of the window's mean."""
        counts = [count for pack in packs for count in self.loss_tokens[pack].tolist()]
        return denominator(counts, self.config.mean_over)

    def _remaining(self) -> Iterator[Window]:
        windows = [window for epoch in self.epoch_windows for window in epoch]
        yield from windows[self.step :]

    # --- one step ---------------------------------------------------------------------------------------------

    def _optimize(self, window: Window) -> tuple[float, float, float]:
        config = self.config
        rate = learning_rate(self.step, self.total, config.learning_rate, config.warmup_steps)
        for group in self.raw_optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.target.device)
        keys: list[str] = []
        for indices, weight in window.packs:
            pack = load_pack(self.features, indices, self.target.device)
            keys += pack.keys
            with self.accelerator.autocast():
                result = self.module(pack, config.rollout_steps)
            loss = weight * result.values.loss / max(window.goals, 1)
            # DDP averages gradients over ranks; the window's mean is over goals, so undo the average.
            self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), config.clip)
        value = float(self.accelerator.reduce(total, "sum"))
        if not math.isfinite(value) or not math.isfinite(float(norm)):
            raise UserError(
                "the loss must stay finite",
                f"{value} at step {self.step} on sequences {keys[:8]}",
                "lower train.learning_rate, or look at these sequences",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value, float(norm), rate

    @torch.no_grad()
    def _validate(self) -> None:
        """Measure the held-out features; every rank its share of packs."""
        self.own.eval()
        sums = ValidationSums(self.config.rollout_steps, tuple(self.config.losses().enabled()))
        packs = list(ordered_packs(self.held_out.lengths(), max(self.config.rows, 2048)))
        for indices in packs[self.accelerator.process_index :: self.accelerator.num_processes]:
            with self.accelerator.autocast():
                sums.add(
                    self.own(
                        load_pack(self.held_out, indices, self.target.device),
                        self.config.rollout_steps,
                        measure=True,
                    )
                )
        self.own.train()
        sums.reduce(lambda sums: self.accelerator.reduce(sums.to(self.target.device), "sum"))
        summary = sums.summary()
        self._log({"step": self.step, "validation": summary})
        if self.accelerator.is_main_process:
            shown = {
                "agreement": "agree/1",
                "alpha": "alpha/1",
                "teacher-forced tau": "tau_teacher_forced",
            }
            values = ", ".join(f"{name} {summary[key]:.3f}" for name, key in shown.items())
            say(f"step {self.step}/{self.total}: held-out {values}")

    # --- what stays -------------------------------------------------------------------------------------------

    def _log(self, row: dict[str, Any]) -> None:
        self.curves.append(row)
        if self.accelerator.is_main_process:
            with open(self.out / CURVES, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        flat = row.get("validation") or {key: value for key, value in row.items() if key != "step"}
        prefix = "validation/" if "validation" in row else "train/"
        self.accelerator.log({prefix + key: value for key, value in flat.items()}, step=row["step"])

    def _card(self) -> HeadCard:
        return HeadCard(
            self.head.family,
            self.target.hash,
            self.target.state,
            self.target.hidden_size,
            self.target.vocab_size,
            self.step,
            config=asdict(self.config),
        )

    def _checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            return
        folder = self.out / "checkpoints"
        save_checkpoint(
            folder / f"step-{self.step:08d}",
            self.head,
            self._card(),
            extra={OPTIMIZER: optimizer_tensors(self.raw_optimizer, self.head)},
            notes={
                "progress.json": {
                    "step": self.step,
                    "total": self.total,
                    "curves": self.curves,
                    "data_digest": self.features.manifest.contract.data_digest,
                }
            },
        )
        for old in find_checkpoints(folder)[:-2]:
            shutil.rmtree(old)

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint of this very run; another run's is refused."""
        self.out.mkdir(parents=True, exist_ok=True)
        found = find_checkpoints(self.out / "checkpoints")
        if found:
            newest = found[-1]
            card, note = read_card(newest), read_json(newest / "progress.json")
            if (
                (card.config, card.head) != (asdict(self.config), asdict(self.head.config))
                or note["data_digest"] != self.features.manifest.contract.data_digest
                or note["total"] != self.total
            ):
                raise UserError(
                    "a checkpoint to resume from must have this run's configuration and data",
                    newest,
                    "delete the run's train folder, or undo the change",
                )
            self.head.load_state_dict(load_tensors(newest / TENSORS, self.head.state_dict()))
            load_optimizer(self.raw_optimizer, self.head, load_file(newest / OPTIMIZER))
            self.step, self.curves = note["step"], note["curves"]
            if self.accelerator.is_main_process:
                say(f"train: resumed at step {self.step} of {self.total}")
        if self.accelerator.is_main_process:
            (self.out / CURVES).write_text(
                "".join(json.dumps(row) + "\n" for row in self.curves), encoding="utf-8"
            )

    def _finish(self) -> HeadCard:
        card = self._card()
        if self.accelerator.is_main_process:
            save_checkpoint(self.out / "head", self.head, card)
        self.accelerator.wait_for_everyone()
        return card


def _marks(total: int, times: int) -> set[int]:
    """`times` steps spread evenly over the run, the last one included."""
    return {max(1, round(total * (index + 1) / times)) for index in range(times)}
