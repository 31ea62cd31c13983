"""A target with its MTP layers in it: what native-MTP families are published as, made of a target and a head.

A new folder: the target's own shards, hard-linked where the file system can and copied where not; one shard more with
the MTP layers; an index over all of them; the target's config with the number of modules; its tokenizer. Two families:

    deepseek_v3              model.layers.{L + k}.*, as published
    llama, mistral, qwen2    model.mtp_layers.0.*, as MiMo's, whose architecture the config names

vLLM serves a MiMo target with Qwen2's layers, which always have q, k and v biases (0.32, mimo.py): zeros for the
target's own layers lie in the new shard. `model_type` stays, by which transformers and mtp_train load the target as
before, without the new shard's tensors; `head.init=native` begins a head as them.

Knows tensors, config keys and files; no training.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.core.errors import UserError
from mtp_train.core.provenance import read_json, write_json
from mtp_train.export import llama
from mtp_train.export.deepseek_nextn import DeepseekNextn, quantised, routing
from mtp_train.export.files import CONFIG, INDEX
from mtp_train.export.layout import Chain, Layout, Serving
from mtp_train.export.mimo import ARCHITECTURE, BIASES, HELD, MimoMtp
from mtp_train.export.texts import copy_texts
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import unlike_llama
from mtp_train.models.target import Target, config_of
from mtp_train.models.weights import find_tensors, names_in, read_tensors
from mtp_train.store.tensor_files import save_tensors

DEEPSEEK = ("deepseek_v3",)
LIKE_MIMO = ("llama", "mistral", "qwen2")
LAYER_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.bias")


class Stitched(Layout):
    """`stitched`."""

    name = "stitched"
    family = "mtp"
    forbidden = ()  # the method stands beside no path of a head
    needs = ("mtp_layers.0.input_proj.weight", "layers.*")

    def head_faults(self, config: Any) -> Iterator[str]:
        yield from MimoMtp().head_faults(
            replace(config, modules=1)
        )  # the norms, which every family has

    def target_faults(self, config: Any, target: Target) -> Iterator[str]:
        kind = target.config.model_type
        if target.path is None:
            yield "a target without a folder"
        if quantised(target):
            yield "a quantised target (engines would read the head as quantised)"
        if kind in DEEPSEEK:
            yield from DeepseekNextn().head_faults(config)
        elif kind in LIKE_MIMO:
            yield from MimoMtp().head_faults(config)
            yield from _unlike_qwen2(target)
        else:
            known = ", ".join((*DEEPSEEK, *LIKE_MIMO))
            yield f"a {kind} target (engines read MTP layers beside {known})"

    def tensors(self, head: DraftHead, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
        """Those of the new shard."""
        made = _inner(target.config.model_type).tensors(head, target, dtype)
        return dict(sorted((made | _zeros(target, dtype)).items()))

    def config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The target's file with the number of modules, and for MiMo's family the architecture."""
        assert target.path is not None
        values: dict[str, Any] = read_json(target.path / CONFIG)
        if target.config.model_type in LIKE_MIMO:
            values["architectures"] = [ARCHITECTURE]
        else:
            values |= routing(target.config.to_dict())  # vLLM's defaults are not transformers'
        return values | {"num_nextn_predict_layers": head.depths}

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """A whole MiMo; a whole DeepSeek is `deepseek_nextn`'s to read."""
        return config.get("architectures") == [ARCHITECTURE]

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The MTP layers, and the zeros beside them."""
        values = read_json(folder / CONFIG)
        files = find_tensors(folder)
        modules = {name for name in files if _of_modules(name, values)}
        shards = {files[name] for name in modules}
        beside = {n for n, file in files.items() if file in shards and LAYER_BIAS.fullmatch(n)}
        return read_tensors(files, sorted(modules | beside)), values

    def read(
        self, tensors: dict[str, Tensor], config: Mapping[str, Any], target: Target
    ) -> DraftHead:
        zeros = _zeros(target, torch.float32)
        biases = {name for name in tensors if LAYER_BIAS.fullmatch(name)}
        wrong = sorted(zeros.keys() - biases) + sorted(n for n in zeros if tensors[n].any())
        if wrong:
            raise UserError(
                "a bias that the target has not must be there, and zero",
                ", ".join(wrong[:4]),
                "export the head again",
            )
        own = {name: value for name, value in tensors.items() if name not in biases}
        return _inner(target.config.model_type).read(own, config, target)

    def served(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], chain: Chain
    ) -> list[Tensor]:
        made = config_of(dict(config))
        width = made.hidden_size // made.num_attention_heads
        values = {"head_dim": width} | made.to_dict() | dict(config)
        return _inner(made.model_type).served(tensors, values, chain)

    def serving(self, config: Any, target: str, head: str, drafts: int) -> list[Serving]:
        draft = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
        vllm = f"""```
vllm serve {head} --speculative-config '{draft}'
```

The folder is the target: nothing else is named. Its weights' hash is not the target's, since there are more of them."""
        how = f"""```
python -m sglang.launch_server --model-path {head} --speculative-algorithm EAGLE \\
    --speculative-num-steps {drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}
```"""
        return [
            Serving("vLLM, method `mtp`", "0.32.0, CPU build, a Llama target", True, vllm),
            Serving("SGLang, algorithm `EAGLE`", "mid 2026", False, how),
        ]

    def write(self, folder: Path, head: DraftHead, target: Target) -> None:
        assert target.path is not None
        values = self.config(head, target)
        copy_texts(target.path, folder)
        write_json(folder / CONFIG, values)
        held = {
            name: file
            for name, file in find_tensors(target.path).items()
            if not _of_modules(name, values)  # an earlier head's, which this one replaces
        }
        shards = sorted(set(held.values()))
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            to = folder / _shard(number, len(shards) + 1)
            names = [name for name, file in held.items() if file == shard]
            _take(shard, names, to)
            index |= dict.fromkeys(names, to.name)
        made = self.tensors(head, target, target.dtype)
        last = folder / _shard(len(shards) + 1, len(shards) + 1)
        save_tensors(made, last, metadata={"format": "pt"})
        index |= dict.fromkeys(made, last.name)
        write_json(folder / INDEX, {"metadata": {}, "weight_map": dict(sorted(index.items()))})


def _inner(kind: str) -> Layout:
    """The layout whose names and equation a family's modules have."""
    return DeepseekNextn() if kind in DEEPSEEK else MimoMtp()


def _of_modules(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is an MTP layer's."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = layer is not None and int(layer[1]) >= int(config["num_hidden_layers"])
    return beyond or name.startswith("model.mtp_layers.")


def _zeros(target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """Biases that a MiMo's layers have and the target's have not."""
    if target.config.model_type not in LIKE_MIMO:
        return {}
    return {
        f"model.layers.{at}.{bias}": torch.zeros(
            layer.get_parameter(bias.replace(".bias", ".weight")).shape[0], dtype=dtype
        )
        for at, layer in enumerate(target.base.layers)
        for bias in BIASES
        if bias not in layer.state_dict()
    }


def _unlike_qwen2(target: Target) -> Iterator[str]:
    """What of the target vLLM's MiMo would compute otherwise."""
    yield from unlike_llama(target)
    yield from sorted(set(target.base.layers[-1].state_dict()) - HELD)
    yield from llama.output_faults(target)
    if getattr(target.config, "hidden_act", "silu") != "silu":
        yield f"hidden_act {target.config.hidden_act}"
    heads = target.config.num_attention_heads
    if target.head_width * heads != target.hidden_size:
        yield f"{heads} heads of {target.head_width} for a width of {target.hidden_size}"


def _take(shard: Path, names: list[str], to: Path) -> None:
    """Put a shard of the target's at `to`: the same file, or a copy; anew where some of its tensors stay behind."""
    if len(names) < len(names_in(shard)):
        kept = read_tensors(dict.fromkeys(names, shard), names)
        save_tensors(kept, to, metadata={"format": "pt"})
        return
    try:
        os.link(shard.resolve(), to)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(shard, to)


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
