"""Quantised targets: which are run, how transformers is asked for them, and what their weights are as numbers.

Two kinds. `target.quantisation=int8` quantises a plain folder's matrices while it is loaded, by torchao. A folder whose
config.json has a `quantization_config` is read as it is: torchao's stay packed; fp8 with a scale per block (DeepSeek-V3
and R1) and mxfp4 (gpt-oss) are multiplied out, so that the target has that precision's weights in the wanted dtype.
Other methods are refused by name rather than computed otherwise than they are served.

Embedding and lm_head stay as they are: losses, heads and the gate read them, and so do serving engines.
Knows no head and no layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, PreTrainedConfig, TorchAoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json

NONE = "none"
TORCHAO = {  # target.quantisation -> torchao's configuration, with its defaults
    "int8": "Int8WeightOnlyConfig",
    "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
    "float8": "Float8WeightOnlyConfig",
    "float8_dynamic": "Float8DynamicActivationFloat8WeightConfig",
}
GPU_ONLY = ("float8_dynamic",)
MULTIPLIED_OUT = ("fp8", "mxfp4")  # by transformers, as a folder is read
EXPERTS = ("n_routed_experts", "num_local_experts")  # under which configs count them
BLOCKS = "mtp_train_fp8"  # transformers' name for `BlockFp8Quantizer`
SCALE_BLOCK = (128, 128)  # rows and columns that share a scale, where a folder doesn't say


def require_quantisation(name: str) -> str:
    """The name, if it is one of target.quantisation's."""
    if name not in (NONE, *TORCHAO):
        raise UserError(
            "target.quantisation must be one of " + ", ".join((NONE, *TORCHAO)),
            name,
            "choose one, or name a folder that is quantised already",
        )
    return name


def quantisation_in(values: dict[str, Any] | None) -> str:
    """What a config's `quantization_config` calls for, by name; a method that isn't run is refused.

    A torchao folder with other options than the defaults has the same name: its files, hence its hash, are its own.
    """
    if not values:
        return NONE
    method = str(values.get("quant_method", "unnamed"))
    if method in MULTIPLIED_OUT:
        return method
    known = {made: name for name, made in TORCHAO.items()}
    kind = _torchao_kind(values)
    if method != "torchao" or kind not in known:
        raise UserError(
            "a target's quantisation must be one that was tried: torchao's "
            + f"{', '.join(TORCHAO.values())}, or {', '.join(MULTIPLIED_OUT)}",
            f"quantization_config with {kind or method}",
            "take the plain weights, with target.quantisation if they are to be quantised",
        )
    if values.get("include_input_output_embeddings"):
        raise UserError(
            "a target's embedding and lm_head must not be quantised: losses and heads read them",
            "quantization_config with include_input_output_embeddings",
            "quantise the target without it",
        )
    return known[kind]


def folder_quantisation(folder: Path) -> str:
    """As `quantisation_in`, of a model folder."""
    return quantisation_in(read_json(folder / "config.json").get("quantization_config"))


def scale_block(folder: Path | None) -> tuple[int, int]:
    """Rows and columns of an fp8 folder's matrices that share a scale; the usual ones without a folder."""
    values = read_json(folder / "config.json").get("quantization_config") if folder else None
    return scale_block_in(values or {})


def scale_block_in(values: dict[str, Any]) -> tuple[int, int]:
    """As `scale_block`, of a config's `quantization_config`."""
    rows, columns = values.get("weight_block_size") or SCALE_BLOCK
    return int(rows), int(columns)


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Scales of an fp8 matrix [N, K] or of a stack of them: the last blocks may be smaller."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))


def loading(config: PreTrainedConfig, wanted: str, device: str) -> tuple[str, dict[str, Any]]:
    """The target's quantisation by name, and what `from_pretrained` is passed for it.

    Args:
        config: of the folder; an fp8 one's is changed, so that our arithmetic multiplies it out.
        wanted: target.quantisation.

    Raises:
        UserError: it isn't run, here or at all, or the folder is quantised and more is wanted.
    """
    values: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    found = quantisation_in(values)
    if found == NONE:
        return wanted, _torchao(wanted, config, device) if wanted != NONE else {}
    if wanted != NONE:
        raise UserError(
            "a folder that is quantised already is not quantised again",
            f"target.quantisation={wanted} for one with {found}",
            "leave target.quantisation=none, or name the folder with plain weights",
        )
    if found in TORCHAO:
        _require_here(found, device)
    if found == "fp8":
        config.quantization_config = values | {"quant_method": BLOCKS, "dequantize": True}
    if found == "mxfp4":
        config.quantization_config = values | {"dequantize": True}
    return found, {}


def require_plain_ends(model: Any) -> None:
    """Raise unless a model's embedding and lm_head are plain matrices."""
    for name in ("get_input_embeddings", "get_output_embeddings"):
        if is_packed(getattr(model, name)().weight):
            raise UserError(
                "a target's embedding and lm_head must not be quantised: losses and heads read them",
                f"{name.removeprefix('get_')} quantised",
                "list them in modules_to_not_convert when quantising",
            )


def is_packed(value: Tensor) -> bool:
    """Whether a weight is torchao's: scaled integers or fp8 that pose as a matrix."""
    return type(value).__module__.startswith("torchao.")


def packed_matrices(model: nn.Module) -> int:
    """How many matrices of a model are packed."""
    return sum(is_packed(parameter) for parameter in model.parameters())


def as_numbers(value: Tensor) -> Tensor:
    """A weight as an ordinary tensor."""
    return value.dequantize() if is_packed(value) else value


def times_scales(value: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """An fp8 matrix [N, K] times its scales [ceil(N/n), ceil(K/k)] of blocks of n rows and k columns, in float32.

    DeepSeek-V3's `weight_scale_inv`: the last blocks may be smaller, as in the 576 rows of its kv_a_proj_with_mqa.
    """
    rows, columns = value.shape
    grid = scale_grid((rows, columns), block)
    if scale.shape != grid:
        raise UserError(
            f"an fp8 matrix {(rows, columns)} must have a scale per {block} block, {grid}",
            tuple(scale.shape),
            "check weight_block_size in the folder's config.json",
        )
    spread = scale.float().repeat_interleave(block[0], 0)[:rows]
    return value.float() * spread.repeat_interleave(block[1], 1)[:, :columns]


def _torchao_kind(values: dict[str, Any]) -> str:
    """The name of a torchao folder's configuration; empty if it is another method's."""
    default = (values.get("quant_type") or {}).get("default", {})
    return str(default.get("_type", "")) if isinstance(default, dict) else str(default)


def _torchao(wanted: str, config: PreTrainedConfig, device: str) -> dict[str, Any]:
    """What quantises matrices while they are loaded. transformers leaves embedding and lm_head out."""
    if any(getattr(config, name, None) for name in EXPERTS):
        raise UserError(
            "target.quantisation is for dense targets: torchao would leave stacked experts as they are",
            f"{config.model_type} with target.quantisation={wanted}",
            "leave target.quantisation=none, or name a folder that is quantised already",
        )
    _require_here(wanted, device)
    import torchao.quantization

    made = getattr(torchao.quantization, TORCHAO[wanted])()
    return {"quantization_config": TorchAoConfig(made)}


def _require_here(name: str, device: str) -> None:
    try:
        import torchao  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"a target quantised as {name} needs torchao",
            "an environment without it",
            "pip install 'mtp_train[quantised]'",
        ) from error
    if name in GPU_ONLY and not device.startswith("cuda"):
        raise UserError(
            f"a target quantised as {name} needs a GPU with fp8 matrix products",
            device,
            "use target.device=cuda, or float8, which quantises the weights alone",
        )


@register_quantization_config(BLOCKS)
class BlockFp8Config(FineGrainedFP8Config):
    """transformers' own, for `BlockFp8Quantizer`."""


@register_quantizer(BLOCKS)
class BlockFp8Quantizer(FineGrainedFP8HfQuantizer):
    """transformers' own but for the scales of a matrix whose last blocks are smaller.

    transformers 5.24 takes rows / scales for a block's rows: of 576 rows with 5 scales it refuses to be, and of 520 it
    takes the wrong ones.
    """

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _BlockDequantize}


class _BlockDequantize(Fp8Dequantize):
    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        rows, columns = self.hf_quantizer.quantization_config.weight_block_size or SCALE_BLOCK
        return times_scales(quantized, scales, (rows, columns)).to(output_dtype or torch.bfloat16)
