"""Kernels of fuseops.kernels.grouped: persistent programs walk over the tiles of all groups.

With TMA, `x`, `weight`, `dy` and `y` are tensor descriptors, pointers otherwise; `y_ptr` and
`dw_ptr` are pointers always.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_GROUPS = tl.constexpr(2048)  # a table entry is group + MAX_GROUPS * row block in the group
RAGGED_ROWS = tl.constexpr(1 << 30)
ZEROS = tl.constexpr(1024)


class HostDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A tensor descriptor of what the launcher knows to be describable: nothing is checked twice."""

    one_layout = True  # of all of its class

    def __init__(self, base, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding = "zero"


def describe(t, block):
    """A descriptor of a tensor as it is."""
    return HostDescriptor(t, t.shape, t.stride(), block)


def describe_ragged(t, block):
    """A descriptor of rows that form groups, used with `ragged` coordinates (the trick, and its
    proof by 64-bit wraparound of addresses, is triton.tools.ragged_tma's).
    """
    rows = 1 << 30
    stride = t.stride(0)
    strides = [2**34 - stride, stride, stride, 1]
    return HostDescriptor(t, [0x7FFF0000, 0x7FFF0000, rows, t.shape[1]], strides, [1, 1, *block])


@triton.jit
def group_rows(offs_ptr, group, R):
    """(first row, number of rows), inside the tensor whatever `offs` says."""
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    return start, tl.maximum(tl.minimum(tl.load(offs_ptr + group), R) - start, 0)


@triton.jit
def ragged(start, size, row, col):
    """Coordinates in a ragged descriptor, where rows at or beyond `size` lie outside: reads give
    zeros, writes do nothing.
    """
    return [RAGGED_ROWS, start + size, RAGGED_ROWS - size + row, col]


@triton.jit
def swizzle(tile, num_m, num_n, GROUP: tl.constexpr):
    """(row block, column block) of a tile: bands of GROUP row blocks, row blocks fastest, so that the
    tiles in flight share rows of both operands in the L2 cache. A short rest joins the band before,
    or it would read all columns again for a few rows.
    """
    bands = tl.maximum((num_m + GROUP // 2) // GROUP, 1)
    first = tl.minimum(tile // (GROUP * num_n), bands - 1) * GROUP
    last = first == (bands - 1) * GROUP
    height = tl.where(last, tl.maximum(num_m - first, 1), GROUP)
    place = tile - first * num_n
    return first + place % height, place // height


@triton.jit(do_not_specialize=["R", "E"])
def group_tiles_kernel(offs_ptr, tiles_ptr, R, E, BLOCK_E: tl.constexpr):
    """A program a group. Layout of the table: see fuseops.kernels.grouped.group_tiles."""
    group = tl.program_id(0)
    groups, step = tl.arange(0, BLOCK_E), tl.arange(0, 256)
    known = groups < E
    start = tl.load(offs_ptr + groups - 1, mask=known & (groups > 0), other=0)
    end = tl.minimum(tl.load(offs_ptr + groups, mask=known, other=0), R)
    size = tl.where(known, tl.maximum(end - start, 0), 0)
    own = tl.sum(tl.where(groups == group, size, 0), axis=0)
    ahead = known & ((size > own) | ((size == own) & (groups < group)))
    tl.store(tiles_ptr + 2 + tl.sum(ahead.to(tl.int32), axis=0), group)
    entries = tiles_ptr + 2 + E
    for level in tl.static_range(3):
        bound = R // (64 << level) + E
        blocks = tl.cdiv(size, 64 << level)
        first = tl.sum(tl.where(groups < group, blocks, 0), axis=0)
        count = tl.sum(tl.where(groups == group, blocks, 0), axis=0)
        for k in range(0, count, 256):
            mask = (k + step < count) & (first + k + step < bound)
            tl.store(entries + first + k + step, group + (k + step) * MAX_GROUPS, mask=mask)
        if group == E - 1:
            counted = tiles_ptr + level if level < 2 else entries + bound
            tl.store(counted, tl.minimum(first + count, bound))
            for k in range(first + count, bound, 256):
                tl.store(entries + k + step, 0 * step, mask=k + step < bound)
        entries += bound


@triton.jit
def zero_padding(y_ptr, offs_ptr, R, E, N):
    """Zero the rows at and beyond offs[-1]."""
    step = tl.arange(0, ZEROS)
    first = tl.load(offs_ptr + E - 1).to(tl.int64) * N + tl.program_id(0) * ZEROS
    end = R.to(tl.int64) * N
    for i in range(first, end, tl.num_programs(0) * ZEROS):
        tl.store(y_ptr + i + step, tl.zeros((ZEROS,), y_ptr.dtype.element_ty), mask=i + step < end)


@triton.jit
def columns_of(acc, SUBTILES: tl.constexpr):
    """The accumulator in SUBTILES parts side by side: a smaller store buffer."""
    if SUBTILES == 1:
        return (acc,)
    else:
        M: tl.constexpr = acc.shape[0]
        halves = acc.reshape(M, 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        return halves


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

    Rows that TMA reads beyond the group stay in rows that are not stored; what it reads beyond K
    and N are zeros.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    total = tl.load(tiles_ptr + BLOCK_M // 128) * num_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=TMA):
        entry = tl.load(tiles_ptr + first_entry + tile // num_n)
        group = entry % MAX_GROUPS
        start, size = group_rows(offs_ptr, group, R)
        inside = (entry // MAX_GROUPS) * num_n + tile % num_n
        block_m, block_n = swizzle(inside, tl.cdiv(size, BLOCK_M), num_n, GROUP)
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
                x_rows = x + (start + rows).to(tl.int64)[:, None] * stride_x
                a = tl.load(
                    x_rows + ks[None, :], mask=(rows < size)[:, None] & (ks < K)[None, :], other=0.0
                )
                w_cols = weight + group.to(tl.int64) * stride_we
                w_cols += cols.to(tl.int64)[None, :] * stride_wn
                b = tl.load(
                    w_cols + ks.to(tl.int64)[:, None] * stride_wk,
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
            parts = columns_of(acc, SUBTILES)
            for i in tl.static_range(SUBTILES):
                col = block_n * BLOCK_N + i * (BLOCK_N // SUBTILES)
                part = parts[i].to(y.dtype).reshape(1, 1, BLOCK_M, BLOCK_N // SUBTILES)
                y.store(ragged(start, size, block_m * BLOCK_M, col), part)
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
    """dw[e] (+)= dy[rows of e].T @ x[rows of e], the largest groups first; an empty group gives zero."""
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    num_m, num_n = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    for tile in range(tl.program_id(0), E * num_m * num_n, tl.num_programs(0)):
        group = tl.load(tiles_ptr + 2 + tile // (num_m * num_n))
        start, size = group_rows(offs_ptr, group, R)
        block_m, block_n = swizzle(tile % (num_m * num_n), num_m, num_n, GROUP)
        rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(size, BLOCK_K)):
            if TMA:
                a = dy.load(ragged(start, size, k * BLOCK_K, block_m * BLOCK_M))
                a = a.reshape(BLOCK_K, BLOCK_M)
                b = x.load(ragged(start, size, k * BLOCK_K, block_n * BLOCK_N))
                b = b.reshape(BLOCK_K, BLOCK_N)
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                at = (start + ks).to(tl.int64)[:, None]
                a = tl.load(
                    dy + at * stride_dy + rows[None, :],
                    mask=(ks < size)[:, None] & (rows < N)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    x + at * stride_x + cols[None, :],
                    mask=(ks < size)[:, None] & (cols < K)[None, :],
                    other=0.0,
                )
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        parts = columns_of(acc, SUBTILES)
        for i in tl.static_range(SUBTILES):
            col = block_n * BLOCK_N + i * WIDTH
            if TMA and not ACCUMULATE:
                part = parts[i].to(dw.dtype).reshape(1, BLOCK_M, WIDTH)
                dw.store([group, block_m * BLOCK_M, col], part)
            else:
                at_cols = col + tl.arange(0, WIDTH)
                out = dw_ptr + (group.to(tl.int64) * N + rows)[:, None] * K + at_cols[None, :]
                mask = (rows < N)[:, None] & (at_cols < K)[None, :]
                part = parts[i]
                if ACCUMULATE:
                    part += tl.load(out, mask=mask, other=0.0)
                tl.store(out, part.to(dw_ptr.dtype.element_ty), mask=mask)
