"""A vLLM plug-in: `mtp` heads that stock vLLM can't serve, in the layout `mtp_train_vllm`.

Runs in vLLM's environment, which is not ours: it imports vLLM, transformers and torch, and nothing else of this
package. vLLM finds it by the entry point group `vllm.general_plugins` and calls `register` in each of its processes.
"""

from __future__ import annotations

MODEL_TYPE = "mtp"  # the one that vLLM takes for an MTP draft of no family of its own
ARCHITECTURE = "MtpTrainMTPModel"


def register() -> None:
    """Make the layout's config and model known, and drafting with several modules. May be called again."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm import ModelRegistry

    from mtp_train.serving_plugin.config import MtpTrainConfig
    from mtp_train.serving_plugin.proposer import install

    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, MtpTrainConfig)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "mtp_train.serving_plugin.model:MtpTrainMtp")
    install()
