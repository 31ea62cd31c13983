"""Errors that a user can act on. Knows nothing of the stages that raise them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A rule that the user's input breaks: the rule, the value received and the remedy, in one line.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, rule: str, received: object, remedy: str) -> None:
        self.rule = rule
        self.received = received
        self.remedy = remedy
        super().__init__(f"{rule}; received {received}; {remedy}")


def nearest(received: object, known: Iterable[str]) -> str:
    """The known name that a misspelt one is nearest to; empty if none is near."""
    close = difflib.get_close_matches(str(received), list(known), n=1)
    return close[0] if close else ""


def did_you_mean(received: object, known: Iterable[str], otherwise: str = "choose one") -> str:
    """The remedy for a misspelt name: the nearest known one, or `otherwise`."""
    found = nearest(received, known)
    return f"did you mean {found}?" if found else otherwise
