"""Grouped GEMMs in Triton, forward and weight gradient: persistent programs whose tile scheduler is one loop over the
output tiles of all groups.

A tile table that `group_tiles_kernel` builds on the device stands for the group sizes, which the host does not know:
the launch is sized by an upper bound, and a program takes every num_programs-th tile. Rows of a forward tile beyond
its group are computed and not stored.

The mainloop is left to Triton's software pipeliner (num_stages). With the constexpr TMA, `x`, `weight`, `dy`, `y` and
`dw` are tensor descriptors, otherwise pointers; `y_ptr` and `dw_ptr` are pointers always. Descriptors of rows are
ragged where a group must end: writes beyond it are dropped, and a sum over its rows reads zeros there, not the NaN of a
neighbour.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .groups import load_group_rows

MAX_GROUPS = tl.constexpr(2048)  # a table entry is group + MAX_GROUPS * row block in the group
RAGGED_ROWS = tl.constexpr(1 << 30)  # the row dimension of a ragged descriptor
ZERO_BLOCK = tl.constexpr(1024)  # elements that a program zeroes at a time


class HostDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A `HostDescriptor` is a TMA descriptor without Triton's checks: the launcher has made them."""

    # all instances share a layout, so that a launch is told by dtype and block alone
    one_layout = True

    def __init__(self, base, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding = "zero"


def describe(t, block):
    """Make a TMA descriptor of a tensor, with its own shape and strides."""
    return HostDescriptor(t, t.shape, t.stride(), block)


def ragged_shape(t):
    """Return the shape and strides of a ragged TMA descriptor (4-D) of a row-major matrix (R, N), whose boxes end where
    a group of rows does.

    Its coordinates are those of `ragged_coords`. The trick, and its proof by 64-bit wraparound of addresses, is
    triton.tools.ragged_tma's.
    """
    stride = t.stride(0)
    shape = [0x7FFF0000, 0x7FFF0000, RAGGED_ROWS.value, t.shape[1]]
    return shape, [2**34 - stride, stride, stride, 1]


def describe_ragged(t, block):
    """Make a ragged TMA descriptor of a matrix (R, N), in boxes of `block`."""
    return HostDescriptor(t, *ragged_shape(t), [1, 1, *block])


@triton.jit
def ragged_coords(start, size, row, col):
    """Return the coordinates of (row of the group, column) in a ragged descriptor, for which rows at or beyond `size`
    are out of bounds: loads give zeros, stores are dropped.
    """
    return [RAGGED_ROWS, start + size, RAGGED_ROWS - size + row, col]


@triton.jit
def swizzle(tile, num_m, num_n, GROUP: tl.constexpr):
    """Map a linear tile index to (row block, column block): the threadblock swizzle.

    Bands of GROUP row blocks, row blocks fastest, so that the tiles in flight share rows of both operands in the L2
    cache. A last band of fewer than half as many joins the one before, or it would read all columns again for a few
    rows.
    """
    num_bands = tl.maximum((num_m + GROUP // 2) // GROUP, 1)
    first_m = tl.minimum(tile // (GROUP * num_n), num_bands - 1) * GROUP
    is_last_band = first_m == (num_bands - 1) * GROUP
    band_height = tl.where(is_last_band, tl.maximum(num_m - first_m, 1), GROUP)
    tile_in_band = tile - first_m * num_n
    return first_m + tile_in_band % band_height, tile_in_band // band_height


@triton.jit(do_not_specialize=["R", "E"])
def group_tiles_kernel(offs_ptr, tiles_ptr, R, E, BLOCK_E: tl.constexpr):
    """Build the tile table, one program a group; fuseops.kernels.grouped.group_tiles describes its layout.

    Each program writes its own group: its rank by falling size, and for each of three tile heights its row blocks. The
    last one also writes the counts, and zeros to unused entries.
    """
    group = tl.program_id(0)
    groups, offsets = tl.arange(0, BLOCK_E), tl.arange(0, 256)
    valid = groups < E
    start = tl.load(offs_ptr + groups - 1, mask=valid & (groups > 0), other=0)
    end = tl.minimum(tl.load(offs_ptr + groups, mask=valid, other=0), R)
    size = tl.where(valid, tl.maximum(end - start, 0), 0)
    own_size = tl.sum(tl.where(groups == group, size, 0), axis=0)
    ranks_before = valid & ((size > own_size) | ((size == own_size) & (groups < group)))
    tl.store(tiles_ptr + 2 + tl.sum(ranks_before.to(tl.int32), axis=0), group)
    entries_ptr = tiles_ptr + 2 + E
    for level in tl.static_range(3):
        capacity = R // (64 << level) + E
        num_blocks = tl.cdiv(size, 64 << level)
        first_entry = tl.sum(tl.where(groups < group, num_blocks, 0), axis=0)
        own_blocks = tl.sum(tl.where(groups == group, num_blocks, 0), axis=0)
        for done in range(0, own_blocks, 256):
            mask = (done + offsets < own_blocks) & (first_entry + done + offsets < capacity)
            tl.store(
                entries_ptr + first_entry + done + offsets,
                group + (done + offsets) * MAX_GROUPS,
                mask=mask,
            )
        if group == E - 1:
            count_ptr = tiles_ptr + level if level < 2 else entries_ptr + capacity
            tl.store(count_ptr, tl.minimum(first_entry + own_blocks, capacity))
            for done in range(first_entry + own_blocks, capacity, 256):
                tl.store(entries_ptr + done + offsets, 0 * offsets, mask=done + offsets < capacity)
        entries_ptr += capacity


@triton.jit
def zero_padding(y_ptr, offs_ptr, R, E, N):
    """Zero the padding rows of y (R, N), those at and beyond offs[-1]; all programs of the grid share them."""
    offsets = tl.arange(0, ZERO_BLOCK)
    begin = tl.load(offs_ptr + E - 1).to(tl.int64) * N + tl.program_id(0) * ZERO_BLOCK
    end = R.to(tl.int64) * N
    for i in range(begin, end, tl.num_programs(0) * ZERO_BLOCK):
        tl.store(
            y_ptr + i + offsets,
            tl.zeros((ZERO_BLOCK,), y_ptr.dtype.element_ty),
            mask=i + offsets < end,
        )


@triton.jit
def split_subtiles(acc, SUBTILES: tl.constexpr):
    """Split the accumulator (M, N) into SUBTILES (1 or 2) along N, for smaller TMA stores."""
    if SUBTILES == 1:
        return (acc,)
    else:
        M: tl.constexpr = acc.shape[0]
        subtiles = acc.reshape(M, 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        return subtiles


@triton.jit(do_not_specialize=["R", "E", "first_entry"])
def grouped_mm_kernel(
    y_ptr, x, weight, y, bias_ptr, probs_ptr, offs_ptr, tiles_ptr, first_entry, R, E, N, K,
    stride_x, stride_we, stride_wn, stride_wk,
    HAS_BIAS: tl.constexpr, HAS_PROBS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e] (* probs)). TRANSPOSED: N is contiguous in weight.

    Persistent: every program loops over tiles of BLOCK_M x BLOCK_N in the order of the table, then zeroes its share of
    padding rows. The load of x by TMA is not ragged: rows that it reads of the next group end in accumulator rows that
    are not stored. Beyond K and N it reads zeros.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.load(tiles_ptr + BLOCK_M // 128) * num_n
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=TMA):
        entry = tl.load(tiles_ptr + first_entry + tile // num_n)
        group = entry % MAX_GROUPS
        start, size = load_group_rows(offs_ptr, group, R)
        tile_in_group = (entry // MAX_GROUPS) * num_n + tile % num_n
        block_m, block_n = swizzle(tile_in_group, tl.cdiv(size, BLOCK_M), num_n, GROUP)
        rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(K, BLOCK_K)):
            if TMA:
                a = x.load([start + block_m * BLOCK_M, k * BLOCK_K])
                if TRANSPOSED:
                    b = weight.load([group, k * BLOCK_K, block_n * BLOCK_N])
                    b = b.reshape(BLOCK_K, BLOCK_N)
                else:
                    b = weight.load([group, block_n * BLOCK_N, k * BLOCK_K])
                    b = b.reshape(BLOCK_N, BLOCK_K).T
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                x_ptrs = x + (start + rows).to(tl.int64)[:, None] * stride_x
                a = tl.load(
                    x_ptrs + ks[None, :], mask=(rows < size)[:, None] & (ks < K)[None, :], other=0.0
                )
                w_ptrs = weight + group.to(tl.int64) * stride_we
                w_ptrs += cols.to(tl.int64)[None, :] * stride_wn
                b = tl.load(
                    w_ptrs + ks.to(tl.int64)[:, None] * stride_wk,
                    mask=(ks < K)[:, None] & (cols < N)[None, :],
                    other=0.0,
                )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
            bias = bias.to(tl.float32)[None, :]
            if HAS_PROBS:
                bias *= tl.load(probs_ptr + start + rows, mask=rows < size, other=0.0)[:, None]
            acc += bias
        if TMA:
            subtiles = split_subtiles(acc, SUBTILES)
            for i in tl.static_range(SUBTILES):
                col = block_n * BLOCK_N + i * (BLOCK_N // SUBTILES)
                subtile = subtiles[i].to(y.dtype).reshape(1, 1, BLOCK_M, BLOCK_N // SUBTILES)
                y.store(ragged_coords(start, size, block_m * BLOCK_M, col), subtile)
        else:
            tl.store(
                y_ptr + (start + rows).to(tl.int64)[:, None] * N + cols[None, :],
                acc.to(y_ptr.dtype.element_ty),
                mask=(rows < size)[:, None] & (cols < N)[None, :],
            )
    zero_padding(y_ptr, offs_ptr, R, E, N)


@triton.jit(do_not_specialize=["R", "E"])
def grouped_wgrad_kernel(
    dw_ptr, dy, x, dw, offs_ptr, tiles_ptr, R, E, N, K, stride_dy, stride_x,
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """dw[e] (+)= dy[rows of e].T @ x[rows of e]; an empty group gives zero.

    Persistent, over tiles of BLOCK_M rows (of N) by BLOCK_N columns (of K); the sum runs over the rows of the group,
    BLOCK_K at a time. Largest groups first, so that no long tile is left for the end.
    """
    SUBTILE_N: tl.constexpr = BLOCK_N // SUBTILES
    num_m, num_n = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    for tile in range(tl.program_id(0), E * num_m * num_n, tl.num_programs(0)):
        group = tl.load(tiles_ptr + 2 + tile // (num_m * num_n))
        start, size = load_group_rows(offs_ptr, group, R)
        block_m, block_n = swizzle(tile % (num_m * num_n), num_m, num_n, GROUP)
        rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(size, BLOCK_K)):
            if TMA:
                a = dy.load(ragged_coords(start, size, k * BLOCK_K, block_m * BLOCK_M))
                a = a.reshape(BLOCK_K, BLOCK_M)
                b = x.load(ragged_coords(start, size, k * BLOCK_K, block_n * BLOCK_N))
                b = b.reshape(BLOCK_K, BLOCK_N)
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                row_index = (start + ks).to(tl.int64)[:, None]
                a = tl.load(
                    dy + row_index * stride_dy + rows[None, :],
                    mask=(ks < size)[:, None] & (rows < N)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    x + row_index * stride_x + cols[None, :],
                    mask=(ks < size)[:, None] & (cols < K)[None, :],
                    other=0.0,
                )
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        subtiles = split_subtiles(acc, SUBTILES)
        for i in tl.static_range(SUBTILES):
            col = block_n * BLOCK_N + i * SUBTILE_N
            if TMA and not ACCUMULATE:
                subtile = subtiles[i].to(dw.dtype).reshape(1, BLOCK_M, SUBTILE_N)
                dw.store([group, block_m * BLOCK_M, col], subtile)
            else:
                subtile_cols = col + tl.arange(0, SUBTILE_N)
                dw_ptrs = (
                    dw_ptr + (group.to(tl.int64) * N + rows)[:, None] * K + subtile_cols[None, :]
                )
                mask = (rows < N)[:, None] & (subtile_cols < K)[None, :]
                subtile = subtiles[i]
                if ACCUMULATE:
                    subtile += tl.load(dw_ptrs, mask=mask, other=0.0)
                tl.store(dw_ptrs, subtile.to(dw_ptr.dtype.element_ty), mask=mask)
