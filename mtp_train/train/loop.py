"""The training loop: the same windows of packs on any number of ranks, exact resume, curves on disk.

Everything that decides a step is a pure function of its number and of how many packs are done (order, learning rate,
noise), so a checkpoint holds parameters, their average, Adam's moments and that position: nothing else, and no number
of ranks. Loss is a mean over the global goals of a window.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from mtp_train.batches.pack import Features, load_pack, ordered_packs
from mtp_train.checkpoint.heads import (
    HeadCard,
    copy_checkpoint,
    find_checkpoints,
    read_card,
    require_match,
    save_checkpoint,
)
from mtp_train.core.errors import UserError
from mtp_train.core.progress import progress, say
from mtp_train.heads.base import DraftHead
from mtp_train.losses.weights import denominator
from mtp_train.models.identity import require_same
from mtp_train.models.target import Target
from mtp_train.store.shards import FeatureStore
from mtp_train.train.average import make_average
from mtp_train.train.best import BEST, forget_best, keep_best
from mtp_train.train.calibrate import (
    Confidences,
    calibration_error,
    chances,
    fit_temperatures,
)
from mtp_train.train.config import TrainConfig
from mtp_train.train.guard import PackReport, alarm, exploded, report
from mtp_train.train.metrics import ValidationSums
from mtp_train.train.noise import noisy_states
from mtp_train.train.online import figures, held_out_requests, measure
from mtp_train.train.optim import learning_rate
from mtp_train.train.order import Order, Position, Window, sequence_costs
from mtp_train.train.parallel import make_strategy
from mtp_train.train.state import Progress, load_state, save_state
from mtp_train.train.step import RolloutModule, chain_seed

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
        stop: frozenset[int] = frozenset(),
    ) -> None:
        for name, store in (("features", features), ("held-out features", held_out)):
            contract = store.manifest.contract
            contract.require(quantisation=target.quantisation, target_hash=target.hash)
            again = "restore the target's files, or run precompute again for this target"
            require_same(contract.identity, target.identity, name, again)
            contract.require(hidden_size=target.hidden_size)
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
        self._require_fit()
        self.requests = (
            held_out_requests(held_out, config.online_eval, stop, self.positions)
            if config.online_eval.every
            else []
        )
        self.average = make_average(head, config.ema) if config.ema else None
        vocabulary = self._vocabulary() if config.loss_vocabulary else None
        self.own = RolloutModule(head, target, vocabulary, config.losses())
        counts = features.lengths(), features.loss_tokens()
        costs = sequence_costs(*counts, target.hidden_size, target.vocab_size)
        self.order = Order(*counts, config, costs)
        self.done = 0  # packs
        self.step = 0
        self.curves: list[dict[str, Any]] = []
        saved = self._resume()  # into the head, before ranks share it
        self.strategy = make_strategy(self.own, config, accelerator)
        # what is measured and kept, inside `strategy.whole()`: the average of the weights where there is one
        self.served = (
            cast(DraftHead, self.average.module) if self.average else self.strategy.readable
        )
        # unwrapped: validates without other ranks
        self.measured = RolloutModule(self.served, target, None, config.losses())
        if saved is not None:
            self.strategy.load_optimizer(saved)
        ranks = accelerator.process_index, accelerator.num_processes
        self.windows = self.order.windows(self.order.position(self.done), *ranks)
        self.total = self.step + len(self.windows)

    def run(self) -> HeadCard:
        validate_at = _marks(self.order.total, self.config.validations)
        save_at = _marks(self.order.total, self.config.checkpoints)
        if self.total <= self.config.warmup_steps and self.accelerator.is_main_process:
            steps = f"{self.total} steps, {self.config.warmup_steps} of them warm-up"
            say(f"train: only {steps}: this head will hardly have learnt anything")
        if self.step == 0:
            self._validate()
        with progress(
            self.total, "train", "step", initial=self.step, shown=self.accelerator.is_main_process
        ) as bar:
            for window in self.windows:
                started = time.perf_counter()
                loss, norm, rate = self._optimize(window)
                self.step += 1
                self.done = window.end
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
                if _passes(window, validate_at):
                    self._validate()
                if self.config.online_eval.due(self.step, self.total):
                    self._measure()
                if _passes(window, save_at):
                    self._checkpoint()
        return self._finish()

    @property
    def positions(self) -> int:
        """The longest sequence that target and head have positions for."""
        target = self.target.max_positions
        return min(target, self.head.positions or target)

    def _require_fit(self) -> None:
        """Refuse a configuration, or features, that this head can't be trained with."""
        longest = max(int(some.lengths().max()) for some in (self.features, self.held_out))
        if longest > self.positions:
            whose = "head" if self.positions < self.target.max_positions else "target"
            raise UserError(
                f"a sequence must fit into the {self.positions} positions of the {whose}",
                f"{longest} tokens",
                f"run precompute again with data.max_tokens={self.positions} or less",
            )
        head, config = self.head, self.config
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

    # --- one step ---------------------------------------------------------------------------------------------

    def _optimize(self, window: Window) -> tuple[float, float, float]:
        config = self.config
        rate = self._learning_rate(window)
        for group in self.strategy.groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.target.device)
        losses = []
        for number, (indices, weight) in enumerate(window.packs, start=1):
            pack = load_pack(self.features, indices, self.target.device)
            noise = (pack, config.feature_noise, config.seed, self.step)
            inputs = noisy_states(*noise) if config.feature_noise else None
            scale, last = weight / max(window.goals, 1), number == len(window.packs)
            seed = chain_seed(config.seed, self.step, indices[0])
            loss = self.strategy.accumulate(
                scale, last, pack, config.rollout_steps, inputs=inputs, seed=seed
            )
            losses.append(loss)
            total += scale * loss
        value = float(self.accelerator.reduce(total, "sum"))
        if not math.isfinite(value) or exploded(value, self.curves, config.explode):
            raise self._alarm(f"loss {value:.4g}", window, losses)
        norm = self.strategy.clip()
        if not math.isfinite(norm):
            raise self._alarm(f"loss {value:.4g}, gradient norm {norm}", window, losses)
        self.strategy.step()
        if self.average:
            with self.strategy.whole():
                self.average.update_parameters(self.strategy.readable)
        return value, norm, rate

    def _learning_rate(self, window: Window) -> float:
        """A function of the packs that are done, counted in steps of as many ranks as there are now."""
        per_step = self.config.accumulation * self.accelerator.num_processes
        steps = window.begin / per_step, self.order.total / per_step
        return learning_rate(*steps, self.config.learning_rate, self.config.warmup_steps)

    def _alarm(self, what: str, window: Window, losses: list[torch.Tensor]) -> UserError:
        """What was wrong with this step, from all ranks; nothing was stepped but by ZeRO, whose clipping is a step."""
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
        mine = packs[self.accelerator.process_index :: self.accelerator.num_processes]
        said = Confidences()
        with self.strategy.whole(), self.accelerator.autocast():
            for indices in mine:
                pack = load_pack(self.held_out, indices, self.target.device)
                found = self.measured(pack, self.config.rollout_steps, measure=True)
                sums.add(found)
                said.add(found)
        self.measured.train()
        if self.served.temperatures is not None:
            self._calibrate(said)
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

    def _calibrate(self, said: Confidences) -> None:
        """Fit the confidence's temperatures, and note how far off its chances are with and without them."""
        shared: list[tuple[torch.Tensor, torch.Tensor]] = gather_object([said.joined()])
        logit_SN, agree_SN = (torch.cat(parts, dim=1) for parts in zip(*shared, strict=True))
        fitted_S = fit_temperatures(logit_SN, agree_SN)
        with self.strategy.whole():
            for head in {self.served, self.strategy.readable}:
                assert head.temperatures is not None
                head.temperatures.copy_(fitted_S)
        errors = {
            name: calibration_error(chances(logit_SN, by_S), agree_SN)
            for name, by_S in (("error", fitted_S), ("error_before", torch.ones_like(fitted_S)))
        }
        calibration = {"temperatures": fitted_S.tolist(), **errors, "chains": logit_SN.shape[1]}
        self._log({"step": self.step, "calibration": calibration})

    def _calibrated(self) -> dict[str, Any]:
        """The newest calibration."""
        rows = (row["calibration"] for row in reversed(self.curves) if "calibration" in row)
        return next(rows, {})

    def _measure(self) -> None:
        """Acceptance through the engine; every rank its share of prompts. The best head so far is kept."""
        config, accelerator = self.config.online_eval, self.accelerator
        mine = self.requests[accelerator.process_index :: accelerator.num_processes]
        best = False
        with self.strategy.whole():
            counts = measure(self.target, self.served, mine, config).to(self.target.device)
            found = figures(accelerator.reduce(counts, "sum"))
            self._log({"step": self.step, "online": found})
            if accelerator.is_main_process:
                best = keep_best(self.out, self.served, self._card())
        if accelerator.is_main_process:
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
        kinds = ("validation", "online", "calibration")
        kind = next((name for name in kinds if name in row), "train")
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
            quantisation=self.target.quantisation,
            identity=self.target.identity,
            config=asdict(self.config),
            changed=[row for row in self.curves if "changed" in row],
            measured=self._measured_now(),
            calibration=self._calibrated(),
        )

    def _measured_now(self) -> dict[str, Any]:
        """Acceptance at this very step, if it was measured; the curves know it after a resume too."""
        online = (row for row in reversed(self.curves) if "online" in row)
        newest = next(online, None)
        return newest["online"] if newest and newest["step"] == self.step else {}

    def _checkpoint(self) -> None:
        optimizer = self.strategy.optimizer_tensors()
        with self.strategy.whole():
            if self.accelerator.is_main_process:
                save_state(
                    self.out,
                    self.strategy.readable,
                    self._card(),
                    optimizer,
                    self._progress(),
                    self.average,
                )

    def _progress(self) -> Progress:
        position = self.order.position(self.done)
        ranks = self.accelerator.num_processes
        return Progress(
            position.epoch, position.packs, self.step, ranks, self._data_digest, self.curves
        )

    @property
    def _data_digest(self) -> str:
        return self.features.manifest.contract.data_digest

    def _resume(self) -> dict[str, torch.Tensor] | None:
        """Go on from the newest whole checkpoint of this very run; another run's is refused.

        Returns the optimiser's state.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        for newest in find_checkpoints(self.out / "checkpoints")[-1:]:
            require_match(read_card(newest), self.target)
        found = load_state(self.out, self.head, self.config, self._data_digest, self.average)
        if found is not None:
            self._go_on_from(found.progress)
        self.accelerator.wait_for_everyone()  # all have read before one writes
        if self.accelerator.is_main_process:
            if found is None:
                forget_best(self.out)
            (self.out / CURVES).write_text(
                "".join(json.dumps(row) + "\n" for row in self.curves), encoding="utf-8"
            )
        return found.optimizer if found else None

    def _go_on_from(self, progress: Progress) -> None:
        self.step, self.curves = progress.step, progress.curves
        self.done = self.order.done(Position(progress.epoch, progress.packs))
        if self.accelerator.is_main_process:
            ranks = self.accelerator.num_processes
            change = "" if ranks == progress.ranks else f", on {ranks} ranks after {progress.ranks}"
            where = f"epoch {progress.epoch + 1}, {progress.packs} of its packs done"
            say(f"train: resumed after step {self.step} ({where}){change}")

    def _finish(self) -> HeadCard:
        with self.strategy.whole():
            if self.accelerator.is_main_process:
                if self.config.keep == "best":
                    copy_checkpoint(self.out / BEST, self.out / "head")
                else:
                    save_checkpoint(self.out / "head", self.served, self._card())
        self.accelerator.wait_for_everyone()
        return read_card(self.out / "head")


def _marks(total: int, times: int) -> list[int]:
    """`times` counts of packs spread evenly over the run, the last one included."""
    return [max(1, round(total * (index + 1) / times)) for index in range(times)]


def _passes(window: Window, marks: list[int]) -> bool:
    return any(window.begin < mark <= window.end for mark in marks)
