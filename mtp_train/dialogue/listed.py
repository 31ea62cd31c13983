"""Single prompts as they are given, each answered once. Knows no template: a prompt is token ids.

`next` and `finish` are what an engine asks for and reports to, as of a `Dialogue`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from mtp_train.dialogue.rows import completion_row
from mtp_train.dialogue.talks import UNANSWERED, Answers, request_seed
from mtp_train.engine.sequences import Completion, Request


class Listed:
    """The requests that the journal lacks; each completion becomes a row, one that was refused or failed has no output.

    Args:
        said: key -> what the row holds beside the completion.
        seed: each answer's random draws depend on it and on the request's key, and on nothing else.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        said: Mapping[str, Mapping[str, Any]],
        journal: Answers,
        bar: tqdm[Any],
        seed: int,
    ) -> None:
        self.said = said
        self.journal = journal
        self.bar = bar
        self.seed = seed
        self._waiting = (request for request in requests if request.key not in journal)

    def next(self) -> Request | None:
        request = next(self._waiting, None)
        return request and replace(request, seed=request_seed(self.seed, request.key))

    def finish(self, completion: Completion) -> None:
        row: dict[str, Any] = {"id": completion.key, "finish": completion.finish}
        if not completion.finish.startswith(UNANSWERED):
            row = {"id": completion.key, **self.said[completion.key], **completion_row(completion)}
        self.journal.append(row)
        self.bar.update()
