"""How a head is fitted: the section `train` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtp_train.core.errors import UserError
from mtp_train.core.keys import END, NOTHING, SPREAD, STEPS, key
from mtp_train.losses.terms import LossConfig, default_weights
from mtp_train.train.online import OnlineConfig

KEEPS = ("last", "best")

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class TrainConfig:
    """How a head is fitted.

    Attributes:
        epochs: passes over the features.
        rows: row budget of one pack (a micro-batch on one rank).
        accumulation: packs per rank and optimiser step.
        parallel: how several ranks share the head (`train.parallel`): ddp, fsdp2, zero1, zero2 or zero3.
        rollout_steps: draft steps trained: step 1 on the target's states, later ones on the head's own.
        step_weights, decay, gamma: geometric (each step `decay` times the one before it), fastmtp, uniform, exponential
            (exp(-s / gamma)) or d_pace (by how far each chain gets).
        loss: weights of loss terms by name (`losses.terms.TERMS`); 0 is off.
        lk_eta: the term `lk`'s own parameter.
        mean_over: tokens, or sequences: each trained token counts the same, or each sequence.
        loss_vocabulary: train on this many of the features' most frequent tokens, p and q renormalised there;
            0 is the whole vocabulary. Validation and the engine always use the whole.
        warm_start: a head's checkpoint to begin from, of the same family and options; empty: a fresh head.
        learning_rate, warmup_steps, beta1, beta2, weight_decay, clip: AdamW, cosine to 2 % of the peak.
        validations: how often in the run the held-out features are measured.
        checkpoints: how often in the run a resumable checkpoint is written; the newest two are kept.
        online_eval: acceptance through the engine while training; the best head by it is kept beside the last.
        keep: which head the run ends with, `last` or `best`.
        ema: decay of the average of weights that is measured and kept in place of the weights themselves
            (`train.average`); 0 is off.
        feature_noise: a of the noise U(-a, a) on the states that the head is fed in training (`train.noise`); 0 is off.
        explode: a loss this many times its running median stops the run (`train.guard`); 0 is off.
    """

    epochs: int = 3
    rows: int = 512
    accumulation: int = key(1, SPREAD)
    parallel: str = key("ddp", NOTHING)
    rollout_steps: int = 3
    step_weights: str = "geometric"
    decay: float = 0.7
    loss: dict[str, float] = field(default_factory=default_weights)
    lk_eta: float = 3.0
    mean_over: str = "tokens"
    gamma: float = 4.0
    loss_vocabulary: int = 0
    warm_start: str = key("", NOTHING)  # its content counts
    learning_rate: float = key(1e-3, STEPS)
    warmup_steps: int = key(20, STEPS)
    beta1: float = key(0.9, STEPS)
    beta2: float = key(0.95, STEPS)
    weight_decay: float = key(0.0, STEPS)
    clip: float = key(1.0, STEPS)
    seed: int = 0
    validations: int = key(6, NOTHING)
    checkpoints: int = key(4, NOTHING)
    online_eval: OnlineConfig = key(OnlineConfig, NOTHING)  # with keep=best it chooses the head
    keep: str = key("last", END)
    ema: float = 0.0
    feature_noise: float = key(0.0, STEPS)
    explode: float = key(10.0, NOTHING)

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
        if self.parallel not in STRATEGIES:
            choices = ", ".join(STRATEGIES)
            raise UserError(f"train.parallel must be one of {choices}", self.parallel, "choose one")
        if self.learning_rate <= 0 or self.clip <= 0 or self.loss_vocabulary < 0:
            values = {
                key: getattr(self, key) for key in ("learning_rate", "clip", "loss_vocabulary")
            }
            raise UserError(
                "train.learning_rate and clip must be above 0, loss_vocabulary 0 or more",
                values,
                "raise it",
            )
        self._require_stabilisers()
        self.losses()  # refuses unknown terms and values out of range
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError(
                "train.beta1 and beta2 must lie in [0, 1)", (self.beta1, self.beta2), "use 0.9"
            )

    def _require_stabilisers(self) -> None:
        if self.keep not in KEEPS:
            raise UserError(
                "train.keep must be one of " + ", ".join(KEEPS), self.keep, "choose one"
            )
        if self.keep == "best" and not self.online_eval.every:
            raise UserError(
                "train.keep=best needs measured acceptance",
                "train.online_eval.every=0",
                "set it to a number of steps",
            )
        if not 0 <= self.ema < 1:
            raise UserError("train.ema must lie in [0, 1)", self.ema, "use 0.999, or 0 for none")
        if self.feature_noise < 0:
            raise UserError("train.feature_noise must be 0 or more", self.feature_noise, "use 0.1")
        if self.explode != 0 and self.explode <= 1:
            raise UserError("train.explode must be above 1, or 0", self.explode, "use 10")

    def losses(self) -> LossConfig:
        return LossConfig(
            self.loss, self.lk_eta, self.step_weights, self.decay, self.mean_over, self.gamma
        )
