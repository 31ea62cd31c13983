"""`mtp-train inspect`: what a data set trains, in the terminal and as a page. Needs no model and no run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtp_train.core.errors import UserError
from mtp_train.core.owned import require_own_file
from mtp_train.core.progress import progress, say
from mtp_train.core.provenance import write_text
from mtp_train.core.records import Accounting, TokenizedConversation
from mtp_train.inspection.collect import Collector, collect
from mtp_train.inspection.page import page
from mtp_train.inspection.pieces import Vocabulary
from mtp_train.inspection.terminal import write
from mtp_train.models.target import stop_tokens
from mtp_train.page.shell import GENERATOR
from mtp_train.text.sources import SourceConfig, tokenized
from mtp_train.text.template import ChatTemplate

ANY_LENGTH = 1 << 40  # lengths are shown, not judged


def tool(arguments: Sequence[str]) -> None:
    """Inspect the data that `arguments` name; a `UserError` at the end if nothing in it can be trained."""
    asked = parse(arguments)
    transformers_logging.set_verbosity_error()  # its warnings about long texts are not about this use
    tokenizer = load_tokenizer(asked.tokenizer)
    vocabulary = read_vocabulary(tokenizer, asked.tokenizer)
    template = ChatTemplate(tokenizer, stop=vocabulary.ends)
    accounting = Accounting()
    collector = Collector(
        vocabulary.size,
        vocabulary.ends,
        show=asked.show,
        seed=asked.seed,
        max_tokens=asked.max_tokens,
    )
    told = collect(
        sequences(asked.data, template, accounting, asked.strict),
        collector,
        accounting,
    )
    write(told, vocabulary, Console(markup=False, highlight=False, emoji=False))
    if asked.html:
        title = ", ".join(Path(path).name for path in asked.data)
        write_text(asked.html, page(told, vocabulary, title))
        say(f"inspect: open {asked.html}")
    if not told.sequences:
        raise UserError("data must hold a reply to train on", "none", "see the reasons above")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtp-train inspect",
        description="Shows what a data set trains: conversations with their trained tokens coloured, "
        "lengths, duplicates, and refused rows with reasons.",
    )
    parser.add_argument(
        "data", nargs="+", metavar="DATA", help="files, folders, globs or hub:NAME of conversations"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the target's folder, or one with its tokenizer",
    )
    parser.add_argument(
        "--show", type=int, default=5, metavar="N", help="conversations to show (default 5)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="which conversations are drawn (default 0)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="count what lies beyond this length"
    )
    parser.add_argument("--strict", action="store_true", help="refuse rows that would be repaired")
    asked = parser.parse_args(arguments)
    if asked.show < 0:
        raise UserError("--show must be 0 or more", asked.show, "use 0 to see statistics alone")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise UserError("--max-tokens must be 1 or more", asked.max_tokens, "leave it out for any")
    if asked.html and asked.html.is_dir():
        raise UserError("--html must name a file", asked.html, f"use {asked.html / 'inspect.html'}")
    if asked.html:
        require_own_file(asked.html, GENERATOR, "move it away, or name another file")
    return asked


def sequences(
    paths: Sequence[str], template: ChatTemplate, accounting: Accounting, strict: bool
) -> Iterator[TokenizedConversation]:
    """Every record of every usable row, of any length; none where all rows are refused, which the accounting tells."""
    sources = [SourceConfig(path, max_tokens=ANY_LENGTH) for path in paths]
    with progress(None, "inspect", "sequence") as bar:
        try:
            for record in tokenized(sources, template, accounting, strict=strict):
                bar.update()
                yield record
        except UserError:
            if not accounting.total:
                raise


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer of a local folder; weights need not be there."""
    if not folder.is_dir():
        raise UserError("--tokenizer must be a folder", folder, "name the target's folder")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            "--tokenizer must be a folder that holds a tokenizer",
            f"{folder}: {error}",
            "name the target's folder",
        ) from error


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Vocabulary:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return Vocabulary(
        size=len(tokenizer),
        special=frozenset(special | set(tokenizer.all_special_ids)),
        ends=stop_tokens(tokenizer, folder),
        decode=decode,
    )
