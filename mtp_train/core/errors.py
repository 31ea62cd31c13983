"""Errors that a user can act on. Knows nothing of the stages that raise them."""

from __future__ import annotations


class UserError(ValueError):
    """A rule that the user's input breaks: the rule, the value received and the remedy, in one line.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, rule: str, received: object, remedy: str) -> None:
        self.rule = rule
        self.received = received
        self.remedy = remedy
        super().__init__(f"{rule}; received {received}; {remedy}")
