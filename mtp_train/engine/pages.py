"""One allocator of pages for target and head, whose full pages may be shared. Knows no tensors.

A full page of keys and values depends on nothing but the tokens up to its end, and, for a head that reads ahead, on
`reach` tokens after it: those are its name. A page without an owner keeps its name until it is needed for something
else, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mtp_train.core.errors import UserError

Name = tuple[int, tuple[int, ...]]  # the page before it, by number of its naming; its own tokens


class PageAllocator:
    """Hands out page numbers 0 .. pages-1 and takes them back.

    Args:
        reach: tokens after a page's last row on which its contents depend.
    """

    def __init__(self, pages: int, page_size: int, reach: int = 0) -> None:
        self.page_size = page_size
        self.pages = pages
        self.reach = reach
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # named pages that nobody owns, oldest first
        self._owners = [0] * pages
        self._page_of: dict[Name, tuple[int, int]] = {}  # name -> (page, number of its naming)
        self._name_of: dict[int, Name] = {}
        self._namings = 0

    @property
    def available(self) -> int:
        """Pages that can be handed out."""
        return len(self._free) + len(self._idle)

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_size)

    def fits(self, rows: int) -> bool:
        return self.pages_for(rows) <= self.available

    def allocate(self, rows: int) -> list[int]:
        """Pages for `rows` rows; call `fits` first."""
        need = self.pages_for(rows)
        if need > self.available:
            raise UserError(
                "a sequence needs free pages",
                f"{need} needed, {self.available} free",
                "raise engine.cache_rows",
            )
        return [self._take() for _ in range(need)]

    def release(self, pages: list[int]) -> None:
        """Give pages back; a named one may be found again until its place is needed."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the longest known beginning of `tokens`, at least one token short of all; now owned."""
        found: list[int] = []
        before = -1
        while (len(found) + 1) * self.page_size + max(self.reach, 1) <= len(tokens):
            entry = self._page_of.get((before, self._text(tokens, len(found))))
            if entry is None:
                break
            page, before = entry
            found.append(page)
        for page in found:
            self._idle.pop(page, None)
            self._owners[page] += 1
        return found

    def name(self, pages: Sequence[int], tokens: Sequence[int], named: int, rows: int) -> int:
        """Make a sequence's full pages known, those after the first `named`; returns how many are named.

        rows: rows of the sequence that hold what they will always hold.
        """
        full = min(rows, len(tokens) - self.reach) // self.page_size
        for index in range(named, full):
            before = -1
            if index:
                earlier = self._name_of.get(pages[index - 1])
                if earlier is None:
                    return index  # another page bears that name: this one cannot be found by what comes before it
                before = self._page_of[earlier][1]
            name = (before, self._text(tokens, index))
            if name in self._page_of or pages[index] in self._name_of:
                return index
            self._namings += 1
            self._page_of[name] = (pages[index], self._namings)
            self._name_of[pages[index]] = name
        return max(named, full)

    def _text(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        begin = index * self.page_size
        return tuple(tokens[begin : begin + self.page_size + self.reach])

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._name_of.pop(page)]
        self._owners[page] = 1
        return page
