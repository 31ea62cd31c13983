# ruff: noqa: RUF001
"""Chat templates of the models that people train heads for, toy tokenizers with their tokens, and rows of every kind.

The published templates are read from an installed trl (its wheel carries them; nothing of it is imported), or from the
folder that TRL_CHAT_TEMPLATES names. What it lacks stands in `own_chat_templates`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import own_chat_templates as own
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtp_train.core.records import Conversation
from mtp_train.text.template import ChatTemplate

TOKENS = re.compile(
    r"<\|[^|<>{}\s]*\|?>|<[a-z_]+\|>|<｜[^｜<>{}]*｜>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|sop)>"
    r"|\[gMASK\]|\[e~\[|\]~b\]|\]~!b\[|</?(?:think|tool_call|tool_response|seed:think)>"
)
TEXTS = re.compile(r"</?(?:think|tool_call|tool_response)>")  # added tokens that are not special


@dataclass(frozen=True)
class Family:
    """A template with the tokens of its models.

    Attributes:
        stop: what ends a reply in serving, by generation_config.json and the tokenizer.
        twin: trl's template that marks what is generated; empty if there is none.
    """

    name: str
    source: str
    eos: str
    stop: tuple[str, ...] = ()
    bos: str = "<s>"
    options: dict[str, Any] = field(default_factory=dict)
    twin: str = ""


CHATML = "<|im_end|>"
LLAMA = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
# Of trl's templates: end token, stop tokens beside it, first token.
PUBLISHED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "cohere": ("<|END_OF_TURN_TOKEN|>", (), "<BOS_TOKEN>"),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", (), "<BOS_TOKEN>"),
    "deepseek": ("<｜end▁of▁sentence｜>", (), "<｜begin▁of▁sentence｜>"),
    "diffusion_gemma": ("<eos>", ("<turn|>", "<|tool_response>"), "<bos>"),
    "gemma4": ("<eos>", ("<turn|>", "<|tool_response>"), "<bos>"),
    "gemma": ("<eos>", ("<end_of_turn>",), "<bos>"),
    "glm4moe": ("<|endoftext|>", ("<|user|>", "<|observation|>"), "<s>"),
    "gptoss": ("<|return|>", ("<|endoftext|>", "<|call|>"), "<|startoftext|>"),
    "idefics3": ("<end_of_utterance>", (), "<|begin_of_text|>"),
    "lfm2": (CHATML, (), "<|startoftext|>"),
    "llama3": ("<|eot_id|>", LLAMA, "<|begin_of_text|>"),
    "llava_next": ("</s>", (), "<s>"),
    "muse_glimmer": ("<|eot|>", (), "<s>"),
    "nemotron": (CHATML, (), "<s>"),
    "phi3": ("<|endoftext|>", ("<|end|>", "<|assistant|>"), "<s>"),
    "qwen": (CHATML, ("<|endoftext|>",), "<s>"),
    "smolvlm": ("<end_of_utterance>", (), "<|im_start|>"),
}


OFF = {"enable_thinking": False}
SWITCHED = ("glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think")  # seen without thinking, too


def trl_templates() -> Path | None:
    """The folder of trl's chat templates, None if there is no trl."""
    named = os.environ.get("TRL_CHAT_TEMPLATES")
    if named:
        return Path(named)
    found = find_spec("trl")
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) / "chat_templates" if places else None


def published_families() -> list[Family]:
    """One per template of trl, in the order of their names."""
    folder = trl_templates()
    families = []
    for path in sorted(folder.glob("*.jinja")) if folder else []:
        name = path.stem
        if name.endswith("_training"):
            continue
        eos, stop, bos = next(v for key, v in PUBLISHED.items() if name.startswith(key))
        twin = path.with_name(f"{name}_training.jinja")
        twin_source = twin.read_text(encoding="utf-8") if twin.is_file() else ""
        source = path.read_text(encoding="utf-8")
        families.append(Family(name, source, eos, stop, bos, twin=twin_source))
        if name in SWITCHED:
            families.append(Family(f"{name}, no thinking", source, eos, stop, bos, OFF))
    return families


def own_families() -> list[Family]:
    """Of shapes that trl's wheel lacks."""
    end = "<｜end▁of▁sentence｜>"
    qwen = (CHATML, ("<|endoftext|>",))
    llama_4 = ("<|eot|>", ("<|eom|>",), "<|begin_of_text|>")
    return [
        Family("mistral v1", own.MISTRAL_V1, "</s>"),
        Family("mistral v3", own.MISTRAL_V3, "</s>"),
        Family("mistral v7", own.MISTRAL_V7, "</s>"),
        Family("mistral v11", own.MISTRAL_V11, "</s>"),
        Family("llama 2", own.LLAMA_2, "</s>"),
        Family("llama 3, first template", own.LLAMA_3_FIRST, "<|end_of_text|>"),
        Family("llama 4", own.LLAMA_4, *llama_4),
        Family("qwq", own.QWQ, *qwen),
        Family("qwen3 thinking", own.QWEN3_THINKING, *qwen),
        Family("deepseek v3.1", own.DEEPSEEK_V3_1, end),
        Family("deepseek v3.1, thinking", own.DEEPSEEK_V3_1, end, options={"thinking": True}),
        Family("kimi k2", own.KIMI_K2, CHATML),
        Family("minimax m2", own.MINIMAX_M2, "[e~["),
        Family("granite 3", own.GRANITE_3, "<|end_of_text|>"),
        Family("olmo 2", own.OLMO_2, "<|endoftext|>", bos="<|endoftext|>"),
        Family("phi 3", own.PHI_3, "<|endoftext|>", ("<|end|>",)),
        Family("gpt-oss", own.HARMONY, "<|return|>", ("<|call|>",)),
        Family("smollm3", own.SMOLLM_3, CHATML),
        Family("smollm3, no thinking", own.SMOLLM_3, CHATML, options=OFF),
    ]


@cache
def _letters() -> dict[str, int]:
    return {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A token per byte, and the family's own."""
    backend = Tokenizer(models.BPE(vocab=_letters(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos
    )
    written = set(TOKENS.findall(family.source)) | set(family.stop)
    plain = {token for token in written if TEXTS.fullmatch(token)}
    special = [AddedToken(t, special=True, normalized=False) for t in sorted(written - plain)]
    made.add_tokens(special, special_tokens=True)
    made.add_tokens([AddedToken(t, normalized=False) for t in sorted(plain)])
    made.chat_template = family.source
    return made


def template_of(family: Family) -> ChatTemplate:
    tokenizer = tokenizer_of(family)
    stop = tokenizer.convert_tokens_to_ids(list(family.stop))
    return ChatTemplate(tokenizer, family.options, stop)


# --- rows -----------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, thought: str = "", **call: Any) -> dict[str, Any]:
    """A reply with reasoning and a call, as far as they are given."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if call:
        function = {"name": "weather", "arguments": call}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


RESULT = {"role": "tool", "content": "4 degrees", "name": "weather", "tool_call_id": "call00001"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
ASK = user("Weather in Oslo?")
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": (user("Who?"), reply("Me.")),
    "multi-turn": (user("Who?"), reply("Me."), user("How old?"), reply("Eleven.")),
    "system": ({"role": "system", "content": "Be brief."}, user("Who?"), reply("Me.")),
    "reasoning": (
        user("2+2?"),
        reply("It is 4.", "Easy sum."),
        user("3+3?"),
        reply("It is 6.", "Another."),
    ),
    "tool call": (ASK, reply("I look.", city="Oslo")),
    "null content": (ASK, reply("", city="Oslo")),  # `content: null` is read as an empty text
    "tool result": (ASK, reply("", city="Oslo"), RESULT, reply("Cold.")),
    "reasoned call": (ASK, reply("", "Ask it.", city="Oslo"), RESULT, reply("Cold.", "Tell it.")),
}


def row(kind: str) -> Conversation:
    messages = ROWS[kind]
    tools = (TOOL,) if any(m.get("tool_calls") for m in messages) else ()
    return Conversation(kind, messages, tools=tools)
