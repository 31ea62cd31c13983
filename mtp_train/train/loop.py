"""The training loop: the same windows of packs on any number of ranks, exact resume, curves on disk.

Everything that decides a step is a pure function of its number (order, learning rate, noise), so a checkpoint holds
parameters, their average, Adam's moments and the step: nothing else. Loss is a mean over the global goals of a window.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from mtp_train.batches.pack import Features, load_pack, ordered_packs
from mtp_train.checkpoint.heads import HeadCard, copy_checkpoint, read_card, save_checkpoint
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.heads.base import DraftHead
from mtp_train.losses.weights import denominator
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.train.average import make_average, require_whole_parameters
from mtp_train.train.best import BEST, forget_best, keep_best
from mtp_train.train.config import TrainConfig
from mtp_train.train.guard import PackReport, alarm, exploded, report
from mtp_train.train.metrics import ValidationSums
from mtp_train.train.noise import noisy_states
from mtp_train.train.online import figures, held_out_requests, measure
from mtp_train.train.optim import learning_rate, make_optimizer
from mtp_train.train.order import Window, epoch_windows
from mtp_train.train.state import Progress, load_state, save_state
from mtp_train.train.step import RolloutModule

CURVES = "curves.jsonl"


def train(
    target: Target,
    head: DraftHead,
    features: Features,
    held_out: Features,
    config: TrainConfig,
    accelerator: Accelerator,
    out: Path,
    stop: frozenset[int] = frozenset(),
) -> HeadCard:
    """Fit `head`; writes `out/head`, `out/curves.jsonl` and resumable checkpoints, and goes on from the newest one.

    Args:
        stop: tokens that end an answer, for the acceptance that is measured through the engine.
    """
    return _Trainer(target, head, features, held_out, config, accelerator, out, stop).run()


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
        stop: frozenset[int],
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
        ranks = accelerator.process_index, accelerator.num_processes
        self.epoch_windows = [
            epoch_windows(features.lengths(), features.loss_tokens(), config, epoch, *ranks)
            for epoch in range(config.epochs)
        ]
        self.total = sum(len(windows) for windows in self.epoch_windows)
        optimizer = make_optimizer(
            head, config.learning_rate, (config.beta1, config.beta2), config.weight_decay
        )
        self._require_fit()
        self.requests = (
            held_out_requests(held_out, config.online_eval, stop, target.max_positions)
            if config.online_eval.every
            else []
        )
        self.average = make_average(head, config.ema) if config.ema else None
        # what is measured and kept: the average of the weights where there is one
        self.served = cast(DraftHead, self.average.module) if self.average else head
        vocabulary = self._vocabulary() if config.loss_vocabulary else None
        # unwrapped: validates without other ranks
        self.own = RolloutModule(head, target, vocabulary, config.losses())
        self.measured = (
            RolloutModule(self.served, target, None, config.losses()) if self.average else self.own
        )
        self.module, self.optimizer = accelerator.prepare(self.own, optimizer)
        self.raw_optimizer: torch.optim.Optimizer = getattr(
            self.optimizer, "optimizer", self.optimizer
        )
        self.step = 0
        self.curves: list[dict[str, Any]] = []

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
                if self.config.online_eval.due(self.step, self.total):
                    self._measure()
                if self.step in save_at:
                    self._checkpoint()
        return self._finish()

    def _require_fit(self) -> None:
        """Refuse a configuration that this head can't be trained with."""
        head, config = self.head, self.config
        if config.ema:
            require_whole_parameters(self.accelerator.distributed_type)
        drafts = config.online_eval.drafts
        if config.online_eval.every and head.steps is not None and drafts > head.steps:
            rule = f"train.online_eval.drafts must be at most {head.steps}, the steps of this {head.family} head"
            raise UserError(rule, drafts, "lower it")
        terms = ", ".join(config.losses().enabled("states"))
        if terms and head.own_output() is not None:
            rule = f"{terms}: states are compared only where the head shares the target's lm_head"
            raise UserError(rule, head.family, "set these weights of train.loss to 0")
        if config.loss_vocabulary and head.vocabulary is not None:
            rule = "train.loss_vocabulary is for heads without a draft vocabulary of their own"
            raise UserError(rule, config.loss_vocabulary, "set it to 0")
        head.require_rollout(config.rollout_steps)

    def _vocabulary(self) -> torch.Tensor:
        """The most frequent tokens of the features, in the order of their ids."""
        counts = self.features.token_counts()
        chosen = counts.argsort(descending=True, stable=True)[: self.config.loss_vocabulary]
        if self.accelerator.is_main_process:
            share = float(counts[chosen].sum() / counts.sum())
            say(f"train: the loss sees {len(chosen)} tokens, {share:.2%} of the text")
        return chosen.sort().values.to(self.target.device)

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
        losses = []
        for indices, weight in window.packs:
            pack = load_pack(self.features, indices, self.target.device)
            noise = (pack, config.feature_noise, config.seed, self.step)
            inputs = noisy_states(*noise) if config.feature_noise else None
            with self.accelerator.autocast():
                result = self.module(pack, config.rollout_steps, inputs=inputs)
            losses.append(result.values.loss.detach())
            loss = weight * result.values.loss / max(window.goals, 1)
            # DDP averages gradients over ranks; the window's mean is over goals, so undo the average.
            self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        value = float(self.accelerator.reduce(total, "sum"))
        if not math.isfinite(value) or exploded(value, self.curves, config.explode):
            raise self._alarm(f"loss {value:.4g}", window, losses)
        norm = float(self.accelerator.clip_grad_norm_(self.module.parameters(), config.clip))
        if not math.isfinite(norm):
            raise self._alarm(f"loss {value:.4g}, gradient norm {norm}", window, losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average:
            self.average.update_parameters(self.head)
        return value, norm, rate

    def _alarm(self, what: str, window: Window, losses: list[torch.Tensor]) -> UserError:
        """What was wrong with this step, from all ranks; nothing was stepped."""
        counts, rank = self.features.loss_tokens(), self.accelerator.process_index
        mine = []
        for (indices, weight), value in zip(window.packs, losses, strict=True):
            goals = max(denominator(counts[indices].tolist(), self.config.mean_over), 1)
            pack = load_pack(self.features, indices, self.target.device)
            mine += [report(rank, float(value) / goals, indices, pack)] if weight else []
        packs: list[PackReport] = gather_object(mine)
        store = self.features.place if isinstance(self.features, FeatureStore) else None
        return alarm(f"{what} at step {self.step + 1}", packs, store, self.target.path)

    @torch.no_grad()
    def _validate(self) -> None:
        """Measure the held-out features; every rank its share of packs."""
        self.measured.eval()
        sums = ValidationSums(self.config.rollout_steps, tuple(self.config.losses().enabled()))
        packs = list(ordered_packs(self.held_out.lengths(), max(self.config.rows, 2048)))
        for indices in packs[self.accelerator.process_index :: self.accelerator.num_processes]:
            with self.accelerator.autocast():
                sums.add(
                    self.measured(
                        load_pack(self.held_out, indices, self.target.device),
                        self.config.rollout_steps,
                        measure=True,
                    )
                )
        self.measured.train()
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

    def _measure(self) -> None:
        """Acceptance through the engine; every rank its share of prompts. The best head so far is kept."""
        config, accelerator = self.config.online_eval, self.accelerator
        mine = self.requests[accelerator.process_index :: accelerator.num_processes]
        counts = measure(self.target, self.served, mine, config).to(self.target.device)
        found = figures(accelerator.reduce(counts, "sum"))
        self._log({"step": self.step, "online": found})
        if accelerator.is_main_process:
            best = keep_best(self.out, self.served, self._card())
            values = ", ".join(
                f"{found[f'per_position/{i + 1}']:.3f}" for i in range(config.drafts)
            )
            say(
                f"step {self.step}/{self.total}: engine tau {found['tau']:.3f}, per position {values}"
                + (" (best so far)" if best else "")
            )

    # --- what stays -------------------------------------------------------------------------------------------

    def _log(self, row: dict[str, Any]) -> None:
        self.curves.append(row)
        if self.accelerator.is_main_process:
            with open(self.out / CURVES, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        kind = next((name for name in ("validation", "online") if name in row), "train")
        flat = row.get(kind) or {key: value for key, value in row.items() if key != "step"}
        self.accelerator.log(
            {f"{kind}/{key}": value for key, value in flat.items()}, step=row["step"]
        )

    def _card(self) -> HeadCard:
        return HeadCard(
            self.head.family,
            self.target.hash,
            self.target.state,
            self.target.hidden_size,
            self.target.vocab_size,
            self.step,
            config=asdict(self.config),
            measured=self._measured_now(),
        )

    def _measured_now(self) -> dict[str, Any]:
        """Acceptance at this very step, if it was measured; the curves know it after a resume too."""
        online = (row for row in reversed(self.curves) if "online" in row)
        newest = next(online, None)
        return newest["online"] if newest and newest["step"] == self.step else {}

    def _checkpoint(self) -> None:
        if self.accelerator.is_main_process:
            save_state(
                self.out,
                self.head,
                self._card(),
                self.raw_optimizer,
                self._progress(),
                self.average,
            )

    def _progress(self) -> Progress:
        digest = self.features.manifest.contract.data_digest
        return Progress(self.step, self.total, digest, self.curves)

    def _resume(self) -> None:
        """Go on from the newest whole checkpoint of this very run; another run's is refused."""
        self.out.mkdir(parents=True, exist_ok=True)
        found = load_state(
            self.out,
            self.head,
            asdict(self.config),
            self.raw_optimizer,
            self._progress(),
            self.average,
        )
        if found is not None:
            self.step, self.curves = found.step, found.curves
            if self.accelerator.is_main_process:
                say(f"train: resumed at step {self.step} of {self.total}")
        if self.accelerator.is_main_process:
            if found is None:
                forget_best(self.out)
            (self.out / CURVES).write_text(
                "".join(json.dumps(row) + "\n" for row in self.curves), encoding="utf-8"
            )

    def _finish(self) -> HeadCard:
        if self.accelerator.is_main_process:
            if self.config.keep == "best":
                copy_checkpoint(self.out / BEST, self.out / "head")
            else:
                save_checkpoint(self.out / "head", self.served, self._card())
        self.accelerator.wait_for_everyone()
        return read_card(self.out / "head")


def _marks(total: int, times: int) -> set[int]:
    """`times` steps spread evenly over the run, the last one included."""
    return {max(1, round(total * (index + 1) / times)) for index in range(times)}
