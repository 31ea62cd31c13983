"""The target's answers to sequences that are trained. Knows no template, no model and no file format.

`regenerate` writes a row per answer, each with the whole prompt that serving would send: what an engine is asked, and
what a reader understands. To train on the rows one by one would compute the first turn of n turns n times. So turns
whose tokens go on exactly where the turn before ended share a sequence:

    turn 0          <user> hi <asst> | yes <end>
    turn 1          <user> hi <asst>   yes <end> <user> why <asst> | because <end>
    sequence, mask  <user> hi <asst>   yes <end> <user> why <asst>   because <end>
                         0  0      0     1     1      0   0      0         1     1

Where the template renders the earlier reply in another way (reasoning dropped, spaces stripped, other token ids for the
same text), the turn starts a sequence of its own: both are trained as serving would see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mtp_train.core.records import TokenizedConversation
from mtp_train.text.sources import Answer


def join_turns(answers: Iterable[Answer]) -> Iterator[tuple[TokenizedConversation, int]]:
    """Sequences of the answers, in their order, each with the number of its answers.

    A conversation's turns follow each other as `<id>`, `<id>#1`, ...
    """
    last: TokenizedConversation | None = None
    count = 0
    following = ""  # key of the conversation's next turn
    for answer in answers:
        base, turn = (answer.key, 0)
        if answer.key == following:
            base, _, number = following.rpartition("#")
            turn = int(number)
        following = f"{base}#{turn + 1}"
        if last and turn and answer.prompt_ids[: len(last.tokens)] == last.tokens:
            last, count = _extended(last, answer), count + 1
            continue
        if last:
            yield last, count
        count = 1
        last = _extended(TokenizedConversation(answer.key, (), (), answer.category), answer)
    if last:
        yield last, count


def _extended(before: TokenizedConversation, answer: Answer) -> TokenizedConversation:
    context = len(answer.prompt_ids) - len(before.tokens)
    return TokenizedConversation(
        before.key,
        answer.prompt_ids + answer.output_ids,
        before.loss_mask + (0,) * context + (1,) * len(answer.output_ids),
        before.category,
    )
