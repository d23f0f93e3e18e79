"""Positions of rows sorted by group, and of columns, whose groups begin at multiples of 128."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.errors import ShapeError

BLOCK = 128


def group_of_row(offs: Tensor, rows: int) -> Tensor:
    """Group index of every row; padding rows (at or beyond offs[-1]) get E.   -> (R,) int64"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs.contiguous(), row, right=True)


def padding_mask(offs: Tensor, rows: int) -> Tensor:
    """True for rows at or beyond offs[-1].   -> (R, 1) bool"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return (row >= offs[-1]).unsqueeze(-1)


def bounds_of(offs: Tensor) -> list[tuple[int, int]]:
    """(first row, end) of each group; reads the values of `offs`."""
    ends = [int(end) for end in offs.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def num_groups(offs: Tensor | None) -> int:
    """The number of groups that end at `offs`; 0 without."""
    return 0 if offs is None else len(offs)


def padded_columns(rows: int, groups: int) -> int:
    """C, the columns for `rows` rows: each group begins at a multiple of 128.   groups: 0 without `offs`"""
    return (rows // BLOCK + groups) * BLOCK if groups else -(-rows // BLOCK) * BLOCK


def column_of_row(offs: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """The column of each row; C for a padding row.   -> (R,) int64"""
    row = torch.arange(rows, device=like.device)
    if offs is None:
        return row
    groups = len(offs)
    group = group_of_row(offs, rows)
    ends = F.pad(offs.long(), (1, 1))  # begin of each group, and 0 for padding rows
    begin = ends[group]
    place = (begin // BLOCK + group) * BLOCK + row - begin
    return torch.where(group == groups, padded_columns(rows, groups), place)


def column_offs(offs: Tensor) -> Tensor:
    """Column ends of groups that begin at multiples of 128: each is the begin of the next.   (E,) -> (E,)"""
    number = torch.arange(1, len(offs) + 1, device=offs.device, dtype=offs.dtype)
    return (offs // BLOCK + number) * BLOCK


def column_bounds(offs: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of each group's columns: from (offs[g-1] // 128 + g) * 128, in whole blocks of 128."""
    begins = [(start // BLOCK + g) * BLOCK for g, (start, _) in enumerate(bounds_of(offs))]
    sizes = [-(-(end - start) // BLOCK) * BLOCK for start, end in bounds_of(offs)]
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


# --- whether the ends of groups are right


def check_offs(offs: Tensor, device: torch.device) -> None:
    """Raise ShapeError for `offs` that are not int32 (int64 may be counts) or not on the device of the rows."""
    if offs.dtype is not torch.int32 or offs.dim() != 1:
        raise ShapeError(
            f"offs must be int32 (E,), the cumulative row end of every group, got {offs.dtype} of shape "
            f"{tuple(offs.shape)}. Counts become offs by Routing.from_counts(tokens_per_expert)."
        )
    if offs.device != device:
        raise ShapeError(f"offs is on {offs.device}, the rows are on {device}: move it there.")


def group_starts(offs: Tensor) -> Tensor:
    """The row at which each group begins.   (E,) ends -> (E,)"""
    return torch.cat([offs.new_zeros(1), offs[:-1]])


def bad_ends(offs: Tensor, rows: int) -> Tensor:
    """A mask of groups that end before they begin, or beyond the last row.   (E,) ends -> (E,) bool"""
    return (offs < group_starts(offs)) | (offs > rows)


def check_ends(offs: Tensor, rows: int) -> None:
    """Raise ShapeError for an end before the previous one, or beyond the rows. Reads the values of `offs`."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if not start <= end <= rows:
            raise ShapeError(bad_end_message(group, start, end, rows))
        start = end


def bad_end_message(group: int, start: int, end: int, rows: int) -> str:
    """The message of an error about the end of one group."""
    if end < start:
        why = f"before it begins ({start})" if group else "which is negative"
    else:
        why = f"but x has {rows} rows"
    return (
        f"offs are cumulative row ends; group {group} ends at row {end}, {why}. "
        "Routing.from_counts(tokens_per_expert) builds them."
    )
