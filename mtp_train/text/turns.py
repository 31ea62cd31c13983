"""Turns of any spelling to messages in the OpenAI form, with every repair named.

What a repair may do: read another spelling, or leave out what can't be trained. It never makes up text. Knows no file
and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_train.text.forms import Chat
from mtp_train.text.json_values import parse
from mtp_train.text.refusal import RowRefused
from mtp_train.text.values import (
    is_nan,
    one_of,
    read_name,
    read_text,
    read_weight,
    require_sound,
    sound_text,
)

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {  # part of their forms, no repair
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function": "tool",
}
ASSISTANTS = ("chatgpt", "bing", "bard", "claude", "gemini", "llama", "ai")
CALLS = ("function_call", "tool_call")  # ShareGPT: a turn that holds nothing but the call
THOUGHTS = ("assistant_analysis", "assistant_thinking", "reasoning")  # channels as roles
FINALS = ("assistant_final",)

TEXTS = ("content", "value", "text")  # keys of a turn's text
THINKING = ("reasoning_content", "reasoning", "thinking")

SPELLING = "role in another spelling"
NAMED_ASSISTANT = "role named after an assistant read as assistant"
NAMED_MODEL = "role named after a model read as assistant"
DEVELOPER = "developer role read as system"
MIXED = "from/value and role/content in one chat"
EMPTY_REPLY = "reply without text left out, with the turns it left unanswered"
OPENING = "assistant's opening before any user turn is context only"
UNCLOSED = "a reply that opens <think> and never closes it is context only"
PART_WEIGHTS = "a reply whose parts differ in weight is context only"


@dataclass
class Messages:
    """A chat in the making."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    untrained: set[int] = field(default_factory=set)
    rules: list[str] = field(default_factory=list)

    def repair(self, rule: str) -> None:
        if rule not in self.rules:
            self.rules.append(rule)


def read_turns(chat: Chat, prompts: bool = False) -> Messages:
    """The messages of a chat, the turns that carry no weight, and the repairs it took.

    Args:
        prompts: the chat is to be answered: a last reply without text is no fault.

    Raises:
        RowRefused: a turn can't be read, or no user turn is left.
    """
    found = Messages()
    turns = [part for turn in chat.turns for part in _open_pair(turn)]
    styles = {_content_key(turn) for turn in turns} - {""}
    if {"value", "content"} <= styles:
        found.repair(MIXED)
    names = _roles(turns, found)
    for turn, role in zip(turns, names, strict=True):
        _add(found, turn, role)
    if not found.messages:
        raise RowRefused("no turns")
    if prompts and _is_empty_reply(found.messages[-1]):
        found.messages.pop()
    _leave_out_empty_replies(found)
    if not prompts:  # else the target gives the replies
        _require_calls(found)
        _leave_unclosed_untrained(found)
    _open_with_user(found)
    return found


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Function schemas in the OpenAI form, from a list or a JSON string of one."""
    if isinstance(tools, str):
        tools = _json(tools, "tools are not valid JSON") if tools.strip() else []
    if isinstance(tools, dict):
        tools = [tools]
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRefused("tools must be a list of function schemas")
    return tuple(map(_tool, tools))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    wrapped = tool if "function" in tool else {"type": "function", "function": tool}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefused("a tool without a function's name")
    require_sound(wrapped, "a tool")
    return wrapped


# --- one turn -------------------------------------------------------------------------------------------------


def _open_pair(turn: Any) -> list[dict[str, Any]]:
    """A turn as it is; a pair of user and bot as two."""
    if not isinstance(turn, dict):
        raise RowRefused("a turn that is no object with a role and a content")
    turn = {
        key: value
        for key, value in turn.items()
        if value is not None or key in ("content", "value")
    }
    if any(is_nan(turn.get(key)) for key in ("role", "from")):
        raise RowRefused("a turn without a role")
    if "from" in turn or "role" in turn:
        return [turn]
    pair = [
        {"role": role, "content": said}
        for role, keys in (("user", ("user", "human")), ("assistant", ("bot", "assistant")))
        if (said := one_of(turn, keys, f"the {role}'s text")) is not None
    ]
    if not pair or "content" in turn or "value" in turn:
        raise RowRefused("a turn without a role")
    return pair


def _content_key(turn: Mapping[str, Any]) -> str:
    return "value" if "from" in turn else "content" if "role" in turn else ""


def _roles(turns: Sequence[Mapping[str, Any]], found: Messages) -> list[str]:
    """Each turn's role. A single unknown name in a chat without an assistant is the model's own."""
    names = [_role(turn, found) for turn in turns]
    unknown = {name for name in names if name not in (*ROLES, *CALLS, *THOUGHTS, *FINALS)}
    if len(unknown) == 1 and "assistant" not in names and names[0] not in unknown:
        found.repair(NAMED_MODEL)
        return ["assistant" if name in unknown else name for name in names]
    if unknown:
        raise RowRefused("a role that is not known")
    return names


def _role(turn: Mapping[str, Any], found: Messages) -> str:
    name = one_of(turn, ("role", "from"), "a turn's role")
    if not isinstance(name, str) or not name.strip():
        raise RowRefused("a turn without a role")
    plain = name.strip().lower()
    known = plain in (*ROLES, *ALIASES, *ASSISTANTS, *CALLS, *THOUGHTS, *FINALS, "developer")
    if plain != name and known:
        found.repair(SPELLING)
    if plain == "developer":
        found.repair(DEVELOPER)
        return "system"
    if plain in ASSISTANTS:
        found.repair(NAMED_ASSISTANT)
        return "assistant"
    return ALIASES.get(plain, plain) if known else name


def _add(found: Messages, turn: Mapping[str, Any], role: str) -> None:
    content = read_text(one_of(turn, TEXTS, "a turn's text"), found.repair)
    last = found.messages[-1] if found.messages else {}
    weightless = read_weight(turn, found.repair) == 0
    if role in FINALS and "reasoning_content" in last and not last["content"]:
        last["content"] = content or ""
        _weigh_with_last(found, weightless)
        return
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if role in CALLS:
        calls = _calls(_json(content or "", "a tool call that is not valid JSON"), found)
        if last.get("role") == "assistant" and "tool_calls" not in last:
            last["tool_calls"] = calls  # what was said before the call is the same reply
            _weigh_with_last(found, weightless)
            return
        message |= {"role": "assistant", "content": "", "tool_calls": calls}
    elif role in THOUGHTS:
        message |= {"role": "assistant", "content": "", "reasoning_content": content or ""}
    elif role in FINALS:
        message["role"] = "assistant"
    else:
        _extras(message, turn, found)
        if content is None and role != "assistant" and role != "system":
            raise RowRefused(f"a {role} turn without content")
    if message["role"] == "assistant" and weightless:
        found.untrained.add(len(found.messages))
    found.messages.append(message)


def _weigh_with_last(found: Messages, weightless: bool) -> None:
    """A turn that goes on with the last message is trained with it, or neither is."""
    last = len(found.messages) - 1
    if weightless != (last in found.untrained):
        found.repair(PART_WEIGHTS)
        found.untrained.add(last)


def _extras(message: dict[str, Any], turn: Mapping[str, Any], found: Messages) -> None:
    """Tool calls, reasoning and names of a turn in the OpenAI form."""
    calls, call = (turn.get(key) for key in ("tool_calls", "function_call"))
    if call not in (None, "", {}) and calls not in (None, "", []):
        raise RowRefused("two values of a turn's calls", "tool_calls, function_call")
    calls = [call] if call not in (None, "", {}) else calls
    if calls not in (None, "", []):
        if message["role"] != "assistant":
            raise RowRefused(f"a {message['role']} turn with tool calls")
        message["tool_calls"] = _calls(calls, found)
    if message["role"] == "assistant":
        reasoning = one_of(turn, THINKING, "a turn's reasoning")
        if not isinstance(reasoning, str | None):
            raise RowRefused("a reasoning that is no text")
        if reasoning and reasoning.strip():
            message["reasoning_content"] = sound_text(reasoning)
    for key in ("tool_call_id", "name"):
        if turn.get(key) is not None:
            message[key] = read_name(turn[key], f"a {key}", found.repair)


# --- tool calls -----------------------------------------------------------------------------------------------


def _calls(calls: Any, found: Messages) -> list[dict[str, Any]]:
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise RowRefused("tool calls must be a list")
    return [_call(call, found) for call in calls]


def _call(call: Any, found: Messages) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefused("a tool call without a function's name")
    if call.get("type") not in (None, "function"):
        raise RowRefused("a tool call that is of no function")
    arguments = one_of(function, ("arguments", "parameters"), "a call's arguments")
    if isinstance(arguments, str):
        arguments = (
            _json(arguments, "tool call arguments are not valid JSON") if arguments.strip() else {}
        )
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowRefused("tool call arguments are not a JSON object")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    require_sound(made, "a tool call")
    if call.get("id") is None:
        return made
    return {"id": read_name(call["id"], "a tool call's id", found.repair), **made}


def _json(text: str, reason: str) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise RowRefused(reason) from None


# --- the chat as a whole --------------------------------------------------------------------------------------


def _leave_out_empty_replies(found: Messages) -> None:
    """A reply without anything in it is nothing the target says, and no context that serving sends."""
    kept: list[dict[str, Any]] = []
    untrained: set[int] = set()
    dropped = False
    for index, message in enumerate(found.messages):
        if _is_empty_reply(message):
            dropped = True
            while kept and kept[-1]["role"] in ("user", "tool"):
                kept.pop()
            continue
        if index in found.untrained:
            untrained.add(len(kept))
        kept.append(message)
    if not dropped:
        return
    if not any(message["role"] == "assistant" for message in kept):
        raise RowRefused("no reply with text")
    found.repair(EMPTY_REPLY)
    found.messages, found.untrained = kept, untrained


def _is_empty_reply(message: Mapping[str, Any]) -> bool:
    said = (
        message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    )
    return message["role"] == "assistant" and not said


def _require_calls(found: Messages) -> None:
    """Serving sends a tool's result after the call that asked for it, and nowhere else."""
    asked = False
    for message in found.messages:
        if message["role"] == "tool" and not asked:
            raise RowRefused("a tool's result without a call before it")
        asked = asked if message["role"] == "tool" else bool(message.get("tool_calls"))


def _leave_unclosed_untrained(found: Messages) -> None:
    """A reply that was cut within its reasoning has an end that the target never says."""
    for index, message in enumerate(found.messages):
        text = message["content"]
        cut = text.lstrip().startswith("<think>") and "</think>" not in text
        if message["role"] == "assistant" and cut and index not in found.untrained:
            found.repair(UNCLOSED)
            found.untrained.add(index)


def _open_with_user(found: Messages) -> None:
    """What the assistant says before any user turn answers nothing that serving sends: context only."""
    roles = [message["role"] for message in found.messages]
    if "user" not in roles:
        raise RowRefused("no user turn")
    opening = {index for index in range(roles.index("user")) if roles[index] == "assistant"}
    if opening - found.untrained:
        found.repair(OPENING)
        found.untrained |= opening
