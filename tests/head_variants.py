"""Every head that the tests of all families run: a family with its options, by a name for test ids."""

from __future__ import annotations

from typing import Any

import torch
from toys import toy_config

from mtp_train.heads.base import DraftHead
from mtp_train.heads.dflash import DFlashConfig
from mtp_train.heads.draft_model import DraftModelConfig
from mtp_train.heads.dspark import DSparkConfig
from mtp_train.heads.eagle import EagleConfig
from mtp_train.heads.eagle3 import Eagle3Config
from mtp_train.heads.families import build_head
from mtp_train.heads.medusa import MedusaConfig
from mtp_train.heads.mtp import MtpConfig
from mtp_train.heads.peagle import PEagleConfig
from mtp_train.models.target import Target, config_values

NORMS = ("enorm", "hnorm", "input_norm", "final_norm")
ONE_NORM_OUT: dict[str, Any] = {f"mtp-{norm}": MtpConfig(**{norm: False}) for norm in NORMS}
# Another width, depth, and other key/value heads than the toy target's.
SMALL_MODEL = config_values(
    toy_config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
)
OWN_LAYER: dict[str, Any] = {
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
VARIANTS: dict[str, Any] = {
    "mtp": MtpConfig(),
    **ONE_NORM_OUT,
    "mtp-all": MtpConfig(**dict.fromkeys(NORMS, False)),
    "mtp-2-modules": MtpConfig(modules=2),  # three steps in the tests: one deeper than its modules
    "mtp-3-modules": MtpConfig(modules=3),
    "mtp-2-layers": MtpConfig(layers=2),
    "mtp-2-modules-2-layers": MtpConfig(modules=2, layers=2, input_norm=False),
    "mtp-part": MtpConfig(draft_vocabulary=40),
    "mtp-2-modules-part": MtpConfig(modules=2, draft_vocabulary=30),
    "mtp-llama": MtpConfig(block="llama"),
    "eagle": EagleConfig(),
    "eagle-own-layer": EagleConfig(block="llama", layer=OWN_LAYER, init="random", fc_bias=True),
    "eagle-2-layers": EagleConfig(layers=2),
    "eagle-part": EagleConfig(draft_vocabulary=40),
    "eagle3": Eagle3Config(draft_vocabulary=40),
    "eagle3-whole": Eagle3Config(draft_vocabulary=0, norm_before_residual=True),
    "eagle3.1": Eagle3Config(draft_vocabulary=40, fc_norm=True, norm_output=True),
    "eagle3-llama": Eagle3Config(draft_vocabulary=40, block="llama"),
    "eagle3-2-layers": Eagle3Config(draft_vocabulary=40, layers=2, norm_before_fc=True),
    "peagle": PEagleConfig(
        draft_vocabulary=40, layers=2, depths=3, depth_share=1.0, least_share=1.0
    ),
    "peagle-llama": PEagleConfig(
        draft_vocabulary=0,
        layers=2,
        depths=3,
        block="llama",
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        mask_token=9,
        depth_share=1.0,
        least_share=1.0,
    ),
    "dflash": DFlashConfig(layers=2, block_size=4, target_states=2, anchor_share=1.0),
    "dspark": DSparkConfig(
        layers=2, block_size=3, target_states=2, markov_rank=8, anchor_share=1.0
    ),
    "medusa": MedusaConfig(),
    "medusa-frozen": MedusaConfig(layers=2, own_lm_heads=False, bias=True),
    "medusa-part": MedusaConfig(layers=2, own_lm_heads=False, draft_vocabulary=40),
    "draft_model": DraftModelConfig(model=SMALL_MODEL),
    "draft_model-tied": DraftModelConfig(
        model=SMALL_MODEL | {"tie_word_embeddings": True, "vocab_size": 70}
    ),
    "draft_model-fewer": DraftModelConfig(model=SMALL_MODEL | {"vocab_size": 50}),
}
# What a window changes is attention alone: the tests of what each row sees run these too.
WINDOWED: dict[str, Any] = {
    "peagle-window": PEagleConfig(
        draft_vocabulary=40, layers=2, depths=3, window=4, depth_share=1.0, least_share=1.0
    ),
    "mtp-window": MtpConfig(window=3),
    "mtp-2-modules-window": MtpConfig(modules=2, window=4),
    "eagle-window": EagleConfig(window=2, layers=2),
    "eagle3-window": Eagle3Config(draft_vocabulary=40, window=5),
    "dflash-window": DFlashConfig(
        layers=1, block_size=4, target_states=2, window=5, anchor_share=1.0
    ),
    "dspark-window": DSparkConfig(
        layers=2,
        block_size=3,
        target_states=1,
        markov_rank=8,
        window=3,
        mask_token=9,
        anchor_share=1.0,
    ),
}
FROZEN: dict[str, Any] = {  # a part of it is not trained
    "draft_model-frozen": DraftModelConfig(model=SMALL_MODEL, freeze_embedding=True),
    "draft_model-tied-frozen": DraftModelConfig(
        model=SMALL_MODEL | {"tie_word_embeddings": True}, freeze_embedding=True
    ),
}


def make_variant(target: Target, name: str, seed: int = 0) -> DraftHead:
    """A head whose every parameter differs from its start, so that none may be ignored."""
    counts = torch.arange(target.vocab_size)
    head = build_head(target, (VARIANTS | WINDOWED | FROZEN)[name], seed, counts)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in head.parameters():
            size = 0.1 * float(parameter.square().mean().sqrt()) + 0.01
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return head
