"""A rendered reply: where it ends, whether all of the message stands in it, and its reasoning. Pure functions on text.

Knows no template and no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

# A generation prompt that leaves the target within its reasoning, as "<think>\n".
OPENED = re.compile(r"(?P<mark><\|?think\|?>|\[THINK\])(?P<space>\s*)\Z")
EMPTY_REASONING = re.compile(r"\s*(<\|?think\|?>|\[THINK\])?\s*(<\|?/think\|?>|\[/THINK\])\s*")
CLOSE = "</think>"


def split_reasoning(message: dict[str, Any]) -> tuple[str, str]:
    """A reply's reasoning and text, also where the reasoning stands in the text, as templates read it."""
    text = message["content"] or ""
    thought = message.get("reasoning_content") or ""
    head, mark, answer = text.partition(CLOSE)
    if thought or not mark:
        return thought, text
    return head.strip().removeprefix("<think>"), answer


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text alone."""
    _, answer = split_reasoning(message)
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    return bare | {
        "content": answer.lstrip("\n") if CLOSE in (message["content"] or "") else answer
    }


def closing(opened: re.Match[str]) -> str:
    """The mark that closes the reasoning that a generation prompt opens."""
    mark = opened["mark"]
    return mark[:1] + ("|/" + mark[2:] if mark[1] == "|" else "/" + mark[1:])


def composed(prompt: str, whole: str, opened: re.Match[str], thought: str) -> str | None:
    """What the target says after a prompt that opens its reasoning, where the template leaves the reasoning out.

        prompt    <Assistant><think>\\n
        whole     <Assistant>4<end>
        composed  <Assistant><think>\\nEasy.\\n</think>\\n\\n4<end>

    None if the reply does not stand behind the header either.
    """
    header = prompt[: opened.start()]
    if not whole.startswith(header):
        return None
    rest = whole[len(header) :]
    own = rest.removeprefix(opened["mark"]).lstrip()
    if thought.strip() and own.startswith(thought.strip()):  # rendered, with other spaces before it
        return prompt + own
    rest = EMPTY_REASONING.sub("", rest, count=1) if EMPTY_REASONING.match(rest) else rest
    edges = ("\n", "\n\n") if "\n" in opened["space"] else ("", "")
    said = thought.strip("\n") if "\n" in opened["space"] else thought
    return prompt + said + edges[0] + closing(opened) + edges[1] + rest


def reply_end(
    prompt: str, whole: str, message: dict[str, Any], stops: Sequence[str], turn_end: str
) -> int:
    """Where the reply ends: behind its first stop token, or behind the token that ends turns after its last part.

    The reply's own text can't hold these tokens: there they are veiled. -1 if there is neither.
    """
    found = [(whole.find(stop, len(prompt)), len(stop)) for stop in stops]
    if turn_end:
        found.append((whole.find(turn_end, _last_part(prompt, whole, message)), len(turn_end)))
    ends = [at + length for at, length in found if at >= 0]
    return min(ends, default=-1)


def _last_part(prompt: str, whole: str, message: dict[str, Any]) -> int:
    parts = [split_reasoning(message)[1].strip()]
    parts += [leaf for call in message.get("tool_calls", ()) for leaf in _leaves(_arguments(call))]
    ends = [
        whole.rfind(part) + len(part) for part in parts if part and part in whole[len(prompt) :]
    ]
    return max([len(prompt), *ends])


def stands(part: str, rendered: str) -> bool:
    """Whether a text stands in what was rendered; templates strip its edges."""
    return part.strip() in rendered


def call_stands(call: dict[str, Any], rendered: str) -> bool:
    """Whether a call's name and every value of its arguments stand in what was rendered."""
    if call["function"]["name"] not in rendered:
        return False
    return all(
        any(form in rendered for form in _spellings(leaf)) for leaf in _leaves(_arguments(call))
    )


def _arguments(call: dict[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (leaf for part in value.values() for leaf in _leaves(part))
    elif isinstance(value, list):
        yield from (leaf for part in value for leaf in _leaves(part))
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value)


def _spellings(leaf: str) -> tuple[str, ...]:
    """A text as it stands, and as JSON writes it."""
    plain = json.dumps(leaf, ensure_ascii=False)[1:-1]
    return leaf, leaf.strip(), plain, json.dumps(leaf)[1:-1], leaf.capitalize()
