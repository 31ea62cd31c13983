"""One allocator of pages for target and head. Knows no tensors."""

from __future__ import annotations

from mtp_train.core.errors import UserError


class PageAllocator:
    """Hands out page numbers 0 .. pages-1 and takes them back."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_size)

    def fits(self, rows: int) -> bool:
        return self.pages_for(rows) <= len(self._free)

    def allocate(self, rows: int) -> list[int]:
        """Pages for `rows` rows; call `fits` first."""
        need = self.pages_for(rows)
        if need > len(self._free):
            raise UserError(
                "a sequence needs free pages",
                f"{need} needed, {len(self._free)} free",
                "raise engine.pages",
            )
        return [self._free.pop() for _ in range(need)]

    def release(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
