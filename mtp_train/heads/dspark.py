"""The `dspark` head: a block of drafts that know the token before them, and how sure they are (arXiv 2607.05147).

    h      = DFlash's block, whose every slot drafts: slot j of anchor a predicts x[a+1+j]
    logits = lm_head(h) + w2 w1[x_before]         w1 an embedding, w2 to the vocabulary: a Markov head of low rank
    c      = proj([h ; w1[x_before]])             logit of the chance that the draft is accepted

x_before is the text's token in training, the draft before when drafting: slots are drawn from left to right behind one
forward. Temperatures, one per slot, make c a calibrated chance (`calibrate`, after training).

Shifts nothing.

Shapes: N blocks, S draft steps, C sequences that draft, D hidden width, R the Markov head's rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtp_train.core.errors import UserError
from mtp_train.heads.base import NextDraft, Unrolled
from mtp_train.heads.dflash import DFlashConfig, DFlashHead, begin
from mtp_train.models.target import Target


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """How a head is made; other attributes as DFlash's.

    Attributes:
        block_size: drafts of a block.
        markov_rank: R.
    """

    family: str = "dspark"
    block_size: int = 7
    markov_rank: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise UserError("head.markov_rank must be 1 or more", self.markov_rank, "raise it")


class MarkovHead(nn.Module):
    """What the token before says of the next one: logits of low rank."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a draft's chance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkHead(DFlashHead):
    """One draft head. Build it with `build`; its parameters start in float32.

    Its temperatures are 1 until they are fitted.
    """

    family = "dspark"
    first_slot: ClassVar[int] = 0

    def __init__(self, target: Target, config: DSparkConfig) -> None:
        if target.logit_softcap is not None:
            rule = "a dspark head adds to logits, which its target must not cap"
            raise UserError(rule, f"a cap of {target.logit_softcap}", "use head=dflash")
        super().__init__(target, config)
        self.markov_head = MarkovHead(target.vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(target.hidden_size + config.markov_rank)
        self.register_buffer("temperatures", torch.ones(config.block_size))
        self.float()

    def read(self, read_SND: Tensor, token_SN: Tensor) -> Unrolled:
        before_SNR = self.markov_head.markov_w1(token_SN)
        weight_VR = self.markov_head.markov_w2.weight
        confidence_SN = self._confidence(read_SND, before_SNR)
        return Unrolled(read_SND, (before_SNR, weight_VR), confidence_SN)

    def follow(self, read_CD: Tensor, logits_CU: Tensor, token_C: Tensor, step: int) -> NextDraft:
        before_CR = self.markov_head.markov_w1(token_C)
        bias_CU = self.markov_head.markov_w2(before_CR)
        assert self.temperatures is not None
        confidence_C = self._confidence(read_CD, before_CR) / self.temperatures[step]
        return NextDraft(logits_CU + bias_CU, confidence_C)

    def _confidence(self, read: Tensor, before: Tensor) -> Tensor:
        said: Tensor = self.confidence_head.proj(torch.cat([read, before.to(read.dtype)], dim=-1))
        return said.squeeze(-1)


def build(
    target: Target, config: DSparkConfig, seed: int = 0, counts_V: Tensor | None = None
) -> DSparkHead:
    """A fresh head for `target`, in float32 on its device; its Markov head and its confidence begin at 0.

    Args:
        counts_V: how often each token stands in the text; the mask token is chosen by it.
    """
    head: Any = begin(DSparkHead, target, config, seed, counts_V)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.zero_()
        head.confidence_head.proj.weight.zero_()
        head.confidence_head.proj.bias.zero_()
        head.markov_head.markov_w1.weight.normal_(
            std=0.02, generator=torch.Generator(target.device).manual_seed(seed)
        )
    return head
