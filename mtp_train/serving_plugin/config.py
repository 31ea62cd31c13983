"""The config.json of the layout `mtp_train_vllm`: a Llama's, with the head's modules and norms. Knows no weights."""

from __future__ import annotations

from transformers import LlamaConfig


class MtpTrainConfig(LlamaConfig):
    """Keys beside a Llama's: `num_nextn_predict_layers`, `module_layers`, `norms` it has, `qkv_bias`."""

    model_type = "mtp"
