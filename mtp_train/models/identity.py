"""What a target is, as a record of named fields: its config, and what turns text into its tokens.

Stores, heads and evaluations carry the record beside the digest of the weights and the quantisation. Two records are
compared field by field, so that a difference names the field and both values. Knows no weights.

    config                 every field of config.json, its defaults written out, but for `CHANGES_NOTHING`
    tokenizer              digest of the files that make tokens of text
    chat_template          digest of the template, wherever it lies in the folder
    end_tokens             those that generation_config.json names, or config.json where there is none
    chat_template_kwargs   what serving passes to the template
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from mtp_train.core.errors import UserError
from mtp_train.core.progress import say
from mtp_train.core.provenance import digest, file_digest, read_json
from mtp_train.models.folder import Stamp, stamp

Identity = dict[str, Any]
FORWARD = ("config", "tokenizer")  # what a head's numbers depend on
TEXT = ("chat_template", "end_tokens", "chat_template_kwargs")  # what its text looked like

CHANGES_NOTHING = (  # of a forward: names, defaults of other parts, and what training alone reads
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",  # a contract's own field
    "torch_dtype",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "problem_type",
    "id2label",
    "label2id",
    "pretraining_tp",
    "num_nextn_predict_layers",  # modules beside the target
    "bos_token_id",  # of text: the tokenizer's and `end_tokens`
    "eos_token_id",
    "pad_token_id",
)
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
VOCABULARIES = (  # where there is no tokenizer.json
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
NOT_TOKENS = (  # of tokenizer_config.json and tokenizer.json: no text's tokens change with these
    "backend",
    "chat_template",  # a field of its own
    "clean_up_tokenization_spaces",  # of decoding
    "is_local",
    "local_files_only",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding",
    "padding_side",
    "processor_class",
    "special_tokens_map_file",
    "stride",
    "tokenizer_file",
    "transformers_version",
    "truncation",
    "truncation_side",
    "truncation_strategy",
)
ABSENT = "absent"


def folder_identity(folder: Path, kwargs: Mapping[str, Any] | None = None) -> Identity:
    """The record of a target's folder.

    Args:
        kwargs: chat_template_kwargs.
    """
    names = (*CONFIGS, *TEMPLATES, "tokenizer.json", *VOCABULARIES)
    paths = [folder / name for name in names] + sorted(folder.glob("*_chat_templates/*.jinja"))
    stamps = tuple(stamp(path) for path in paths if path.is_file())
    found: Identity = json.loads(_folder_identity(folder.resolve(), stamps))
    return found | {"chat_template_kwargs": plain(dict(kwargs or {}))}


def config_identity(config: PreTrainedConfig, kwargs: Mapping[str, Any] | None = None) -> Identity:
    """The record of a target without a folder, which has no text of its own."""
    nothing = {"tokenizer": "", "chat_template": "", "end_tokens": []}
    return {"config": config_fields(config), **nothing, "chat_template_kwargs": plain(kwargs or {})}


def config_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's fields that may change a forward; unknown ones among them."""
    return _counted(plain(config.to_dict()))


def end_tokens(folder: Path) -> list[int]:
    """Tokens that end an answer by generation_config.json, or by config.json where there is none.

    As transformers and vLLM read them; the tokenizer's own end token comes beside these.
    """
    there = (folder / name for name in ("generation_config.json", "config.json"))
    first = next((path for path in there if path.is_file()), None)
    values = read_json(first) if first else {}  # a tokenizer may lie alone
    listed = values.get("eos_token_id", (values.get("text_config") or {}).get("eos_token_id"))
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({int(token) for token in listed if token is not None})


def require_same(
    recorded: Identity,
    current: Identity,
    what: str,
    remedy: str,
    fields: tuple[str, ...] = (*FORWARD, *TEXT),
) -> None:
    """Raise, naming fields and both values, unless `what` was made with the target as it is now.

    A record of an earlier version holds nothing: then only weights and quantisation were compared, which is said.
    """
    if not recorded:
        say(f"{what}: recorded before config and tokenizer were; compared by weights alone")
        return
    found = differences(recorded, current, fields)
    if found:
        raise UserError(f"{what} must be of the target as it is now", "; ".join(found), remedy)


def differences(
    recorded: Identity, current: Identity, fields: tuple[str, ...] = (*FORWARD, *TEXT)
) -> list[str]:
    """`field then -> now` of each difference; a field that one of the two does not hold is not compared."""
    both = [name for name in fields if name in recorded and name in current]
    then, now = ({name: one[name] for name in both} for one in (recorded, current))
    if "config" in then and then["config"] != now["config"]:
        then["config"] = _as_read_now(then["config"])
    flat_then, flat_now = dict(_flat(then)), dict(_flat(now))
    return [
        f"{name.removeprefix('config.')} {flat_then.get(name, ABSENT)} -> {flat_now.get(name, ABSENT)}"
        for name in dict.fromkeys((*flat_then, *flat_now))
        if flat_then.get(name, ABSENT) != flat_now.get(name, ABSENT)
    ]


def plain(value: Any) -> Any:
    """As JSON gives it back, 10000.0 as 10000: equal values are written alike."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _counted(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in CHANGES_NOTHING}


@cache
def _folder_identity(folder: Path, _stamps: tuple[Stamp, ...]) -> str:
    found = {
        "config": _read_config(folder),
        "tokenizer": _tokenizer(folder),
        "chat_template": _chat_template(folder),
        "end_tokens": end_tokens(folder),
    }
    return json.dumps(found)


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json; as they stand there, where this version of transformers does not know the type."""
    try:
        return config_fields(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError):
        values: dict[str, Any] = plain(read_json(folder / "config.json"))
        return _counted(values)


def _tokenizer(folder: Path) -> str:
    """Digest of what decides a text's tokens; empty without a tokenizer."""
    found: dict[str, Any] = {}
    if (folder / "tokenizer.json").is_file():
        found["tokenizer.json"] = _without(read_json(folder / "tokenizer.json"))
    else:
        there = [name for name in VOCABULARIES if (folder / name).is_file()]
        found |= {name: file_digest(folder / name) for name in there}
    if found and (folder / "tokenizer_config.json").is_file():
        found["tokenizer_config.json"] = _without(read_json(folder / "tokenizer_config.json"))
    return digest(plain(found)) if found else ""


def _without(values: Any) -> dict[str, Any]:
    return {name: value for name, value in dict(values).items() if name not in NOT_TOKENS}


def _chat_template(folder: Path) -> str:
    """Digest of the template or templates that transformers would take; empty without one."""
    found: Any = None
    if (folder / "tokenizer_config.json").is_file():
        found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if (folder / TEMPLATES[1]).is_file():
        found = read_json(folder / TEMPLATES[1]).get("chat_template")
    if (folder / TEMPLATES[0]).is_file():
        found = (folder / TEMPLATES[0]).read_text(encoding="utf-8")
    more = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    return digest([found, more]) if found or more else ""


def _as_read_now(fields: dict[str, Any]) -> dict[str, Any]:
    """Recorded config fields as this version of transformers writes them out."""
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return config_fields(AutoConfig.for_model(fields["model_type"], **rest))
    except (KeyError, TypeError, ValueError):  # what is recorded is no config of this version's
        return fields


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """A record's values, those of records within it by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
