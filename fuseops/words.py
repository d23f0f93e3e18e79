"""Words for people, in every text, page and error: sizes, numbers of things, dtypes, tables."""

from collections.abc import Collection, Sequence

import torch


def size(nbytes: int) -> str:
    """A number of bytes in the largest unit that it reaches: 1536 is 1.5 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def plural(n: int, word: str) -> str:
    """2, "miss" -> 2 misses."""
    return f"{n} {word}" if n == 1 else f"{n} {word}es" if word.endswith("s") else f"{n} {word}s"


def dtype_name(dtype: torch.dtype | None) -> str:
    """torch.bfloat16 -> bfloat16; nothing of None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, whose columns are two spaces apart.   right: which are aligned right"""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if k in right else cell.ljust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
