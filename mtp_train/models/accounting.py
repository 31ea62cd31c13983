"""Hold a model folder's tensors against its model: each comes from the files, none is left over; else refused by name.

Decided on the files' headers before any weight is read. What a loader makes of them (renamed, stacked, multiplied out,
tied) is transformers' own knowledge: it loads the folder onto the `meta` device and says what was missing, left over
or of another shape. What it passes in silence is added here: kinds of numbers, scales, numbered experts, tied copies.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.models.folder import (
    COPY,
    SECOND_FORM,
    Fingerprint,
    TensorHeader,
    fingerprint,
    read_headers,
    some,
)
from mtp_train.models.quantised import NONE, loading, quantisation_in, scale_block_in, scale_grid

WIDE = ("F16", "BF16", "F32", "F64")
PACKED = {"fp8": ("F8_E4M3",), "mxfp4": ("U8",)}  # beside wide numbers; torchao checks its own
SCALE = "_scale_inv"  # of an fp8 matrix, behind its name
PAIR = ("_blocks", "_scales")  # of an mxfp4 matrix
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
MTP_MARK = "eh_proj.weight"  # of a layer past the last one that is a published MTP module
ROTARY = "rotary_emb.inv_freq"  # a buffer that old checkpoints hold; the forward computes it
MTP_PREFIXES = ("model.mtp_layers.", "mtp.")  # as MiMo and Qwen3-Next name theirs

_passed: set[tuple[Path, Fingerprint]] = set()


def require_accounted(
    folder: Path, config: PreTrainedConfig, device: str = "cpu", *, trust_remote_code: bool = False
) -> None:
    """Raise unless the folder's tensors are those of the model that its config describes.

    A folder that passed is not looked at again by this process while its files stay as they are.

    Args:
        config: as it was read from the folder.
        device: where the model will run.
    """
    key = folder.resolve(), fingerprint(folder)
    if key in _passed:
        return
    headers = read_headers(folder)
    values = getattr(config, "quantization_config", None) or {}
    quantised = quantisation_in(values)
    _require_numbers(headers, quantised)
    if quantised == "fp8":
        _require_scales(headers, scale_block_in(values))
    if quantised == "mxfp4":
        _require_pairs(headers)
    _require_experts(headers)
    model, found = _load_on_meta(folder, config, device, trust_remote_code)
    _require_complete(folder, found["missing_keys"], found["mismatched_keys"])
    _require_known(folder, found["unexpected_keys"], headers, int(config.num_hidden_layers))
    _require_equal_copies(headers, model.all_tied_weights_keys)
    _passed.add(key)


def _load_on_meta(
    folder: Path, config: PreTrainedConfig, device: str, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """transformers' model of the folder without storage, and its account of the tensors."""
    config = copy.deepcopy(config)
    loading(config, NONE, device)  # has our arithmetic multiply fp8 out, as the load itself does
    try:
        made: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except RuntimeError as error:  # tensors that can't be made into the model's
        raise UserError(
            "a model's tensors must be those that its config describes",
            f"{folder}: {str(error).splitlines()[0]}",
            COPY,
        ) from error
    model, account = made
    return model, account


def _require_numbers(headers: Mapping[str, TensorHeader], quantised: str) -> None:
    """Integers and fp8 without a quantization_config would be taken for the weights themselves."""
    if quantised not in (NONE, *PACKED):
        return  # torchao's, which says itself what its tensors are
    known = (*WIDE, *PACKED.get(quantised, ()))
    odd = [name for name, header in headers.items() if header.dtype not in known]
    if odd:
        raise UserError(
            f"tensors of a target with quantisation {quantised} must be {', '.join(known)}",
            f"{some(odd)} of {headers[odd[0]].dtype} in {headers[odd[0]].file}",
            "check quantization_config in its config.json, or take the plain weights",
        )


def _require_scales(headers: Mapping[str, TensorHeader], block: tuple[int, int]) -> None:
    """An fp8 matrix without its scales would be taken as it is."""
    scaled = {name for name, header in headers.items() if header.dtype in PACKED["fp8"]}
    missing = [name + SCALE for name in scaled if name + SCALE not in headers]
    alone = [n for n in headers if n.endswith(SCALE) and n.removesuffix(SCALE) not in scaled]
    _refuse_incomplete(headers, missing, alone, "an fp8 matrix and its scales must come together")
    for name in sorted(scaled):
        wanted, found = scale_grid(headers[name].shape, block), headers[name + SCALE].shape
        if found != wanted:
            raise UserError(
                f"an fp8 matrix must have a scale per {block} block, {wanted} for {name}",
                found,
                "check weight_block_size in the folder's config.json",
            )


def _require_pairs(headers: Mapping[str, TensorHeader]) -> None:
    of = {
        kind: {name.removesuffix(kind) for name in headers if name.endswith(kind)} for kind in PAIR
    }
    blocks, scales = (of[kind] for kind in PAIR)
    missing = [name + PAIR[1] for name in blocks - scales]
    missing += [name + PAIR[0] for name in scales - blocks]
    _refuse_incomplete(headers, missing, [], "mxfp4 blocks and scales must come together")


def _refuse_incomplete(
    headers: Mapping[str, TensorHeader], missing: list[str], alone: list[str], rule: str
) -> None:
    if missing or alone:
        said = [f"no {some(sorted(missing))}"] if missing else []
        said += [f"{some(sorted(alone))} alone"] if alone else []
        folder = next(iter(headers.values())).file.parent
        raise UserError(rule, f"{', '.join(said)} in {folder}", COPY)


def _require_experts(headers: Mapping[str, TensorHeader]) -> None:
    """Raise unless the experts of a layer are numbered from 0 on and all have the same tensors.

    Loaders stack them in the order of their numbers, whatever these are.
    """
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in headers:
        if match := EXPERT.fullmatch(name):
            found[match[1]][match[3]].add(int(match[2]))
    for prefix, parts in found.items():
        wanted = set(range(1 + max(max(numbers) for numbers in parts.values())))
        missing = [
            f"{prefix}.{number}.{part}"
            for part, numbers in parts.items()
            for number in wanted - numbers
        ]
        _refuse_incomplete(headers, missing, [], "a layer's experts must all have the same tensors")


def _require_complete(
    folder: Path, missing: set[str], other: set[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> None:
    if missing:
        tie = ", or say tie_word_embeddings in config.json if the lm_head is the embedding"
        raise UserError(
            "a model's files must hold all of its tensors: others would be random numbers",
            f"{folder} without {some(sorted(missing))}",
            COPY + (tie if "lm_head.weight" in missing else ""),
        )
    if other:
        name, found, wanted = sorted(other)[0]
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise UserError(
            "a tensor must have the shape that config.json describes",
            f"{name} {tuple(found)} for {tuple(wanted)}{more} in {folder}",
            "copy config.json and the weights from the same place",
        )


def _require_known(
    folder: Path, extra: set[str], headers: Mapping[str, TensorHeader], layers: int
) -> None:
    """Say what lies in the folder that no forward reads; refuse what is neither the model's nor known."""
    unread = {
        "tensors of MTP modules": {
            n for n in {*headers, *extra} if _of_mtp_module(n, headers, layers)
        },
        "old rotary buffers": {n for n in headers if n.endswith(ROTARY)},
        "zero biases": {n for n in extra if n.endswith(".bias") and _is_zero(headers.get(n), n)},
        "files with the weights again": {p.name for p in folder.glob(f"{SECOND_FORM}*")},
    }
    other = sorted(extra.difference(*unread.values()))
    if other:
        raise UserError(
            "a model's files must hold no tensors but its own: they would be left out of it",
            f"{folder} with {some(other)}",
            "check config.json (num_hidden_layers, biases), or take a checkpoint of this model type",
        )
    told = [
        f"{len(names)} {kind} ({some(sorted(names))})" for kind, names in unread.items() if names
    ]
    if told:
        say(f"{folder}: not part of its forward: {'; '.join(told)}")


def _is_zero(header: TensorHeader | None, name: str) -> bool:
    return header is not None and not bool(_read(header.file, name).any())


def _of_mtp_module(name: str, headers: Mapping[str, TensorHeader], layers: int) -> bool:
    if name.startswith(MTP_PREFIXES):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(match and int(match[1]) >= layers and f"{match[0]}{MTP_MARK}" in headers)


def _require_equal_copies(headers: Mapping[str, TensorHeader], tied: Mapping[str, str]) -> None:
    """Tensors that config.json ties may be there twice, if they are the same: engines read either."""
    for name, source in tied.items():
        if name in headers and source in headers:
            one, other = (_read(headers[key].file, key) for key in (name, source))
            if not torch.equal(one, other):
                raise UserError(
                    f"config.json ties {name} to {source}: they must be equal, or one left out",
                    f"{headers[name].file} with two that differ",
                    "set tie_word_embeddings to false in config.json, if the model has both",
                )


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)
