"""An inspection as tables and sentences, one set for terminal and page. Knows no markup and no colour."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mtp_train.inspection.bins import Bin
from mtp_train.inspection.collect import OTHER, Duplicates, Finding, Inspection, quantile, weight
from mtp_train.inspection.pieces import Vocabulary, token_text, visible
from mtp_train.page.figures import MISSING, count, figure
from mtp_train.page.table import Row, Table

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
ENDS_SHOWN = 5  # kinds of header or of last token that are listed


@dataclass(frozen=True)
class Check:
    """Something to look at if it is there."""

    name: str
    found: Finding
    total: int
    unit: str
    meaning: str

    @property
    def flagged(self) -> bool:
        return self.found.count > 0


def headline(told: Inspection) -> str:
    """The data set in a sentence."""
    rows = told.accounting
    refused = sum(rows.refused.values())
    if not told.sequences:
        return f"Nothing to train on: {count(refused)} of {count(rows.total)} rows were refused."
    return (
        f"{share(told.trained, told.tokens)} of {count(told.tokens)} tokens are trained, in "
        f"{plural(told.sequences, 'sequence')} from {plural(rows.total - refused, 'row')}; "
        f"{plural(refused, 'row')} refused."
    )


def advice(told: Inspection) -> str:
    """What to do where there is nothing to train on; else empty."""
    if told.sequences:
        return ""
    return (
        "A conversation trains its assistant turns, and none was found. Prompts without answers are answered by the "
        "target: mtp-train regenerate. For other rows see the reasons and the first row of each."
    )


def rows_table(told: Inspection) -> Table:
    """What became of every input row."""
    rows = told.accounting
    found: list[Row] = [("used as is", "", "", *part(rows.used, rows.total))]
    for word, reasons in (("repaired", rows.repaired), ("refused", rows.refused)):
        for reason, times in sorted(reasons.items(), key=lambda item: -item[1]):
            example = rows.examples.get(reason, "")
            found.append((word, visible(reason), visible(example), *part(times, rows.total)))
    found.append(("input", "", "", *part(rows.total, rows.total)))
    return Table("Rows", ("rows", "why", "first", "number", "share"), found, 3)


def tokens_table(told: Inspection) -> Table:
    rows = [
        ("sequences", count(told.sequences), ""),
        ("tokens", count(told.tokens), ""),
        ("trained tokens", *part(told.trained, told.tokens)),
        ("replies", count(told.replies.total()), ""),
        ("token ids trained somewhere", *part(told.trained_ids, told.vocabulary)),
        ("token ids never trained", *part(told.vocabulary - told.trained_ids, told.vocabulary)),
    ]
    return Table("Tokens", ("", "number", "share"), rows)


def lengths_table(told: Inspection) -> Table:
    header = ("", "mean", "least", *(f"{round(100 * q)} %" for q in QUANTILES), "most")
    named = (
        ("tokens per sequence", told.lengths),
        ("tokens per reply", told.replies),
        ("replies per sequence", told.turns),
    )
    rows = [(name, *spread(counts)) for name, counts in named if counts]
    return Table("Lengths", header, rows)


def spread(counts: Counter[int]) -> Row:
    quantiles = (count(quantile(counts, q)) for q in QUANTILES)
    mean = figure(weight(counts) / counts.total(), 1)
    return mean, count(min(counts)), *quantiles, count(max(counts))


def histogram_table(bins: list[Bin]) -> Table:
    total = sum(one.count for one in bins)
    rows = [(one.name, *part(one.count, total)) for one in bins]
    return Table("Histogram", ("tokens", "number", "share"), rows)


def begins_table(told: Inspection, vocabulary: Vocabulary) -> Table:
    """The tokens that stand before the first trained one of a reply: its header, or the mask is wrong."""
    named = [
        ("others" if ids == OTHER else token_text(ids, vocabulary), times)
        for ids, times in told.before.most_common(ENDS_SHOWN)
    ]
    return listed("Replies begin after", named, told.before.total())


def ends_table(told: Inspection, vocabulary: Vocabulary) -> Table:
    """The last trained token of a reply: the end of the turn, or the mask is wrong."""
    named = [
        (token_text([token], vocabulary), times)
        for token, times in told.last.most_common(ENDS_SHOWN)
    ]
    return listed("Replies end with", named, told.last.total())


def listed(title: str, named: list[tuple[str, int]], total: int) -> Table:
    rest = total - sum(times for _, times in named)
    shown = [*named, *([("others", rest)] if rest else [])]
    rows = [(name, *part(times, total)) for name, times in shown]
    return Table(title, ("text", "replies", "share"), rows)


def checks(told: Inspection) -> list[Check]:
    """The same ones in the same order for every data set; the last one only where a length was named."""
    signs = told.signs
    equal, prompts = as_finding(told.equal), as_finding(told.prompts)
    found = [
        of_sequences(told, "nothing is trained", signs.untrained, "they teach nothing"),
        of_sequences(told, "only the last token is trained", signs.last_only, "a shifted mask?"),
        of_replies(told, "the reply is empty", signs.empty, "the end of the turn alone is trained"),
        of_replies(
            told, "the reply has no end-of-turn token", signs.unended, "cut, or never ended"
        ),
        of_sequences(told, "ids outside the vocabulary", signs.outside, "another tokenizer's?"),
        of_sequences(told, "the whole sequence is a duplicate", equal, "trained on twice"),
        of_sequences(told, "the prompt is a duplicate", prompts, "those of whole duplicates too"),
    ]
    if told.max_tokens:
        name = f"longer than {count(told.max_tokens)} tokens"
        found.append(of_sequences(told, name, signs.too_long, lies_beyond(told)))
    return found


def of_sequences(told: Inspection, name: str, found: Finding, meaning: str) -> Check:
    return Check(name, found, told.sequences, "sequences", meaning)


def of_replies(told: Inspection, name: str, found: Finding, meaning: str) -> Check:
    return Check(name, found, told.replies.total(), "replies", meaning)


def lies_beyond(told: Inspection) -> str:
    tokens = share(told.tokens_beyond, told.tokens)
    return f"{tokens} of all tokens and {share(told.trained_beyond, told.trained)} of the trained ones lie beyond"


def as_finding(found: Duplicates) -> Finding:
    return Finding(found.repeated, list(found.largest[0][1]) if found.largest else [])


def checks_table(told: Inspection) -> Table:
    rows = [check_row(check) for check in checks(told)]
    header = ("", "what", "found", "share", "for example")
    return Table("Worth a look", header, rows, 2)


def check_row(check: Check) -> Row:
    mark = "look" if check.flagged else "ok"
    found = f"{count(check.found.count)} of {count(check.total)} {check.unit}"
    keys = visible(", ".join(check.found.keys)) or MISSING
    what = f"{check.name}: {check.meaning}" if check.flagged else check.name
    return mark, what, found, share(check.found.count, check.total), keys


def duplicates_table(told: Inspection) -> Table:
    """The largest groups of each kind."""
    rows = [
        (name, visible(", ".join(keys)), count(size))
        for name, found in (("sequence", told.equal), ("prompt", told.prompts))
        for size, keys in found.largest
    ]
    note = (
        f"{plural(told.equal.groups, 'group')} of equal sequences, "
        f"{plural(told.prompts.groups, 'group')} of equal prompts; the largest are listed."
    )
    return Table("Duplicates", ("equal", "some of their keys", "times"), rows, 2, note)


def longest_table(told: Inspection) -> Table:
    rows = [(visible(key), count(tokens)) for tokens, key in told.longest]
    return Table("Longest sequences", ("key", "tokens"), rows)


def all_tables(told: Inspection, vocabulary: Vocabulary) -> list[Table]:
    """In reading order; those without a row are left out."""
    found = [rows_table(told)]
    if told.sequences:
        found += [
            tokens_table(told),
            begins_table(told, vocabulary),
            ends_table(told, vocabulary),
            checks_table(told),
            lengths_table(told),
            longest_table(told),
            duplicates_table(told),
        ]
    return [table for table in found if table.rows]


def part(value: int, total: int) -> Row:
    """A number and its share."""
    return count(value), share(value, total)


def share(value: int, total: int) -> str:
    """In percent; a rare thing is not written as none."""
    if not total:
        return MISSING
    percent = 100 * value / total
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.2f} %" if 0 < percent < 1 else f"{percent:.1f} %"


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")
