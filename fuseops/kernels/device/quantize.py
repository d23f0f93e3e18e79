"""Kernels of fuseops.kernels.quantize."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import after_launch, before_launch

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)
PADDING: tl.constexpr = tl.constexpr(16)
"""Rows of zeros that a program stores at once: more would cost the registers of its main work."""


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN does not count (the larger of NaN and 0 is 0)."""
    return tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=axis), 0.0)


@triton.jit
def inverse_scale(amax, LIMIT: tl.constexpr, POW2: tl.constexpr):
    """LIMIT / amax, correctly rounded, at most FLT_MAX; rounded down to a power of two if wanted;
    1 for amax 0. An infinite amax counts as the largest finite value.
    """
    amax = tl.minimum(amax, FLT_MAX)
    inv = tl.minimum(tl.div_rn(LIMIT, tl.where(amax == 0.0, LIMIT, amax)), FLT_MAX)
    if POW2:
        inv = (inv.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return inv


@triton.jit
def vector_scales(amax, LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr):
    """(inverse scales, scales) of amax (BLOCK,). The gathers give every thread one element for the
    divisions: else each that holds a part of a row or column would divide for all of it.
    """
    at = tl.arange(0, BLOCK)
    inv = inverse_scale(tl.gather(amax, at, axis=0), LIMIT, POW2)
    return tl.gather(inv, at, axis=0), tl.div_rn(1.0, inv)


@triton.jit
def widened(x):
    """x as float32. bfloat16 by other instructions than ``.to`` takes: between two uses the compiler
    then keeps x as it was loaded, in half of the registers.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def converted(x, inv, like_ptr):
    """x * inv in the FP8 format of ``like_ptr``. The conversion saturates."""
    return (widened(x) * inv).to(like_ptr.dtype.element_ty)


@triton.jit
def load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """float32 tile at (row0, col0): one 64-bit base, 32-bit offsets within the tile."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    return tl.load(
        x_ptr + row0.to(tl.int64) * stride_x + col0 + (r * stride_x + c), mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def store_tile(y_ptr, q, row0, col0, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """q into the tile at (row0, col0) of y (R, N)."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    tl.store(y_ptr + row0.to(tl.int64) * N + col0 + (r * N + c), q, mask=mask)


@triton.jit
def load_slices(x_ptr, row0, col0, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile at (row0, col0) as four slices (BLOCK_R // 4, BLOCK_N): row 4 i + j is row i
    of the j-th, so that four rows of one column meet in one thread.
    """
    base = x_ptr + row0.to(tl.int64) * stride_x + col0
    a = load_slice(base, 0, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    b = load_slice(base, 1, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    c = load_slice(base, 2, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    d = load_slice(base, 3, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    return a, b, c, d


@triton.jit
def load_slice(
    base, J: tl.constexpr, rows, cols, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    r, c = tl.arange(0, BLOCK_R // 4)[:, None] * 4 + J, tl.arange(0, BLOCK_N)[None, :]
    return tl.load(base + (r * stride_x + c), mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def join4(a, b, c, d):
    """(..., 2, 2) of four (...), in this order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def split4(x):
    """What ``join4`` has joined."""
    ac, bd = tl.split(x)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def column_words(a, b, c, d, inv, col_ptr):
    """Slices times inv as FP8, four rows of a column in one word: one conversion takes two of them."""
    a, b, c, d = widened(a) * inv, widened(b) * inv, widened(c) * inv, widened(d) * inv
    q = join4(a, b, c, d).to(col_ptr.dtype.element_ty)
    a, b, c, d = split4(q.to(tl.uint8, bitcast=True).to(tl.uint32))
    return a | (b << 8) | (c << 16) | (d << 24)


@triton.jit
def store_transposed(
    col_ptr, words, row0, col0, end, R, N,
    ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Words of ``column_words``, rows row0 to end, into the transposed tensor (N, R). Where ALIGN,
    which divides R, allows, they are stored as words, if all four rows are there: the exchange
    between threads then moves words, and a thread stores 16 bytes. row0 is a multiple of four then.
    """
    n, r = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_R // 4)[None, :]
    words = tl.trans(words)
    if ALIGN % 4 == 0:
        pitch = R // ALIGN * (ALIGN // 4)
        at = col_ptr.to(tl.pointer_type(tl.uint32)) + col0.to(tl.int64) * pitch + row0 // 4
        tl.store(at + (n * pitch + r), words, mask=(n < N - col0) & (r < end // 4 - row0 // 4))
    else:
        base = col_ptr + col0.to(tl.int64) * R + row0
        for j in tl.static_range(4):
            q = (words >> 8 * j).to(tl.uint8).to(col_ptr.dtype.element_ty, bitcast=True)
            mask = (n < N - col0) & (4 * r + j < end - row0)
            tl.store(base + (n * R + 4 * r + j), q, mask=mask)


@triton.jit
def aligned(R, ALIGN: tl.constexpr):
    """R, which ALIGN divides, in a form that says so to the compiler."""
    return R // ALIGN * ALIGN


@triton.jit
def column_amax(a, b, c, d):
    """The largest magnitude of each column of four slices."""
    a, b = tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))
    c, d = tl.abs(c.to(tl.float32)), tl.abs(d.to(tl.float32))
    return amax_of(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 0)


@triton.jit(do_not_specialize=["R"])
def amax_kernel(
    x_ptr, partial_ptr, R, N, stride_x,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile."""
    before_launch(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    largest = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, BLOCK_R) * num_n, tl.num_programs(0)):
        rows = (tile // num_n * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        cols = (tile % num_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < R)[:, None] & (cols < N)
        x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit(do_not_specialize=["R"])
def quantize_tensor_kernel(
    x_ptr, inv_ptr, row_ptr, R, N, stride_x,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rowwise. The last tiles come first: the pass for the amax left them in L2."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    after_launch(PDL)
    q = converted(x, tl.load(inv_ptr), row_ptr)
    store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)


@triton.jit(do_not_specialize=["R"])
def quantize_rows_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    inv = inverse_scale(amax_of(x, 1), LIMIT, POW2)
    tl.store(scale_ptr + rows, tl.div_rn(1.0, inv), mask=rows < R)
    q = converted(x, inv[:, None], row_ptr)
    tl.store(row_ptr + (rows * N)[:, None] + cols, q, mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_vectors_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Vectors of 128 along a row, rowwise only; a tile is some of them wide."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    WIDE: tl.constexpr = BLOCK_N // 128
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    x = tl.reshape(x, (BLOCK_R, WIDE, 128))
    inv = inverse_scale(amax_of(x, 2), LIMIT, POW2)
    q = tl.reshape(converted(x, inv[:, :, None], row_ptr), (BLOCK_R, BLOCK_N))
    store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)
    rows = row0 + tl.arange(0, BLOCK_R)[:, None]
    block = col0 // 128 + tl.arange(0, WIDE)[None, :]
    at = scale_ptr + rows + block.to(tl.int64) * R
    tl.store(at, tl.div_rn(1.0, inv), mask=(rows < R) & (block * 128 < N))


@triton.jit(do_not_specialize=["R"])
def quantize_squares_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Squares of 128 x 128, rowwise only; a tile is one of them."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    inv = inverse_scale(tl.max(amax_of(x, 1), axis=0), LIMIT, POW2)
    tl.store(scale_ptr + pid, tl.div_rn(1.0, inv))
    store_tile(row_ptr, converted(x, inv, row_ptr), row0, col0, R, N, BLOCK_R, BLOCK_N)


@triton.jit
def store_slices(row_ptr, a, b, c, d, row0, col0, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """FP8 slices into the tile at (row0, col0) of y (R, N)."""
    base = row_ptr + row0.to(tl.int64) * N + col0
    store_slice(base, 0, a, R - row0, N - col0, N, BLOCK_R, BLOCK_N)
    store_slice(base, 1, b, R - row0, N - col0, N, BLOCK_R, BLOCK_N)
    store_slice(base, 2, c, R - row0, N - col0, N, BLOCK_R, BLOCK_N)
    store_slice(base, 3, d, R - row0, N - col0, N, BLOCK_R, BLOCK_N)


@triton.jit
def store_slice(
    base, J: tl.constexpr, q, rows, cols, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    r, c = tl.arange(0, BLOCK_R // 4)[:, None] * 4 + J, tl.arange(0, BLOCK_N)[None, :]
    tl.store(base + (r * N + c), q, mask=(r < rows) & (c < cols))


@triton.jit
def row_scales(a, b, c, d, LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr):
    """Scales of all rows of four slices, and the inverse ones of each slice's, as columns."""
    amax = tl.reshape(
        join4(amax_of(a, 1), amax_of(b, 1), amax_of(c, 1), amax_of(d, 1)), (BLOCK_R,)
    )
    inv, scale = vector_scales(amax, LIMIT, POW2, BLOCK_R)
    a, b, c, d = split4(tl.reshape(inv, (BLOCK_R // 4, 2, 2)))
    return scale, a[:, None], b[:, None], c[:, None], d[:, None]


@triton.jit(do_not_specialize=["R"])
def quantize_blocks_kernel(
    x_ptr, row_ptr, col_ptr, row_scale_ptr, col_scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, SQUARE: tl.constexpr,
    ROW: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Columnwise, and rowwise too if ROW, tiles of 128 rows: SQUARE, the tile is one block, or vectors
    along rows and columns.
    """
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block_r, block_n = pid // num_n, pid % num_n
    row0, col0 = block_r * BLOCK_R, block_n * BLOCK_N
    cols = col0 + tl.arange(0, BLOCK_N)
    if AGAIN and ROW:
        x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
        if SQUARE:
            inv = inverse_scale(tl.max(amax_of(x, 1), axis=0), LIMIT, POW2)
            q = converted(x, inv, row_ptr)
        else:
            row_inv, row_scale = vector_scales(amax_of(x, 1), LIMIT, POW2, BLOCK_R)
            rows = row0 + tl.arange(0, BLOCK_R)
            tl.store(row_scale_ptr + block_n.to(tl.int64) * R + rows, row_scale, mask=rows < R)
            q = converted(x, row_inv[:, None], row_ptr)
        store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)
    a, b, c, d = load_slices(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    if SQUARE:
        inv = inverse_scale(tl.max(column_amax(a, b, c, d), axis=0), LIMIT, POW2)
        scale = tl.div_rn(1.0, inv)
        tl.store(col_scale_ptr + block_n * tl.cdiv(R, BLOCK_R) + block_r, scale)
        if ROW:
            tl.store(row_scale_ptr + pid, scale)
            e, f, g, h = inv, inv, inv, inv
    else:
        inv, scale = vector_scales(column_amax(a, b, c, d), LIMIT, POW2, BLOCK_N)
        tl.store(col_scale_ptr + block_r.to(tl.int64) * N + cols, scale, mask=cols < N)
        inv = inv[None, :]
        if ROW and not AGAIN:
            tl.static_assert(BLOCK_N == 128, "a tile is one vector wide")
            scale, e, f, g, h = row_scales(a, b, c, d, LIMIT, POW2, BLOCK_R)
            rows = row0 + tl.arange(0, BLOCK_R)
            tl.store(row_scale_ptr + block_n.to(tl.int64) * R + rows, scale, mask=rows < R)
    words = column_words(a, b, c, d, inv, col_ptr)
    if ROW and not AGAIN:
        store_slices(
            row_ptr, converted(a, e, row_ptr), converted(b, f, row_ptr), converted(c, g, row_ptr),
            converted(d, h, row_ptr), row0, col0, R, N, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    end = aligned(R, ALIGN)
    store_transposed(col_ptr, words, row0, col0, end, R, N, ALIGN, BLOCK_R, BLOCK_N)


@triton.jit(do_not_specialize=["R"])
def column_amax_kernel(
    x_ptr, partial_ptr, R, N, stride_x,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile of a block of columns: one row of ``partial``. All
    programs go down the rows together, so that L2 holds the last ones in the end.
    """
    before_launch(PDL)
    split = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.zeros((BLOCK_N,), dtype=tl.float32)
    step = tl.num_programs(1) * BLOCK_R
    for start in tl.range(split * BLOCK_R, R, step, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows < R)[:, None] & (cols < N)[None, :]
        at = x_ptr + (rows * stride_x)[:, None] + cols[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    tl.store(partial_ptr + split * N + cols, largest, mask=cols < N)


@triton.jit(do_not_specialize=["S"])
def column_scale_kernel(
    partial_ptr, inv_ptr, scale_ptr, amax_ptr, S, N,
    LIMIT: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales of a block of columns (of one, for a whole tensor) from their S partial amaxes."""
    before_launch(PDL)
    after_launch(PDL)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[:, None]
        mask = (s < S) & (cols < N)[None, :]
        at = partial_ptr + s.to(tl.int64) * N + cols[None, :]
        largest = tl.maximum(largest, tl.load(at, mask=mask, other=0.0))
    amax = tl.minimum(tl.max(largest, axis=0), FLT_MAX)
    inv = inverse_scale(amax, LIMIT, POW2)
    tl.store(amax_ptr + cols, amax, mask=cols < N)
    tl.store(inv_ptr + cols, inv, mask=cols < N)
    tl.store(scale_ptr + cols, tl.div_rn(1.0, inv), mask=cols < N)


@triton.jit(do_not_specialize=["R"])
def quantize_columns_kernel(
    x_ptr, inv_ptr, row_ptr, col_ptr, R, N, stride_x,
    ONE: tl.constexpr, ROW: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columnwise, and rowwise too if ROW, with ONE scale, or one a column. The last tile comes first:
    the pass for the amax left it in L2.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    a, b, c, d = load_slices(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    after_launch(PDL)
    if ONE:
        inv = tl.load(inv_ptr)
    else:
        cols = col0 + tl.arange(0, BLOCK_N)
        inv = tl.load(inv_ptr + cols, mask=cols < N, other=1.0)[None, :]
    words = column_words(a, b, c, d, inv, col_ptr)
    if ROW:
        store_slices(
            row_ptr, converted(a, inv, row_ptr), converted(b, inv, row_ptr),
            converted(c, inv, row_ptr), converted(d, inv, row_ptr), row0, col0, R, N, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    end = aligned(R, ALIGN)
    store_transposed(col_ptr, words, row0, col0, end, R, N, ALIGN, BLOCK_R, BLOCK_N)


@triton.jit
def load_edge(x_ptr, first, last, cols, N, stride_x):
    """The at most four rows from first to last, as float32."""
    rows = (first + tl.arange(0, 4)).to(tl.int64)
    mask = (rows < last)[:, None] & (cols < N)[None, :]
    at = x_ptr + (rows * stride_x)[:, None] + cols[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_edge(col_ptr, q, first, last, cols, R, N):
    """FP8 rows first to last byte by byte: their words belong to two blocks."""
    rows = first + tl.arange(0, 4)
    mask = (rows < last)[:, None] & (cols < N)[None, :]
    tl.store(col_ptr + (cols * R)[None, :] + rows[:, None], q, mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_group_blocks_kernel(
    x_ptr, offs_ptr, col_ptr, scale_ptr, R, N, E, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, ALIGN: tl.constexpr,
    LOG_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Block b belongs to the last group g that begins at or before it, at block begin // 128 + g.

    Groups begin anywhere: the words of ``store_transposed`` begin at ``base``, the first multiple of
    four, and the rows before and after them are edges.
    """
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block, col0 = pid // num_n, pid % num_n * BLOCK_N
    group = 0
    for i in tl.static_range(LOG_E):  # a search for the group, in steps of halves
        after = group + (1 << (LOG_E - 1 - i))
        begin = tl.load(offs_ptr + after - 1, mask=after < E, other=0)
        group = tl.where((after < E) & (begin // BLOCK_R + after <= block), after, group)
    begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    row0 = begin + (block - begin // BLOCK_R - group) * BLOCK_R
    end = tl.minimum(row0 + BLOCK_R, tl.load(offs_ptr + group))
    cols = (col0 + tl.arange(0, BLOCK_N)).to(tl.int64)
    if row0 < end:
        base = (row0 + 3) // 4 * 4
        head_end = tl.minimum(base, end)
        tail = tl.maximum(end // 4 * 4, base)
        a, b, c, d = load_slices(x_ptr, base, col0, end, N, stride_x, BLOCK_R, BLOCK_N)
        amax = column_amax(a, b, c, d)
        if row0 < head_end:
            head = load_edge(x_ptr, row0, head_end, cols, N, stride_x)
            amax = tl.maximum(amax, amax_of(head, 0))
        inv, scale = vector_scales(amax, LIMIT, POW2, BLOCK_N)
        tl.store(scale_ptr + block.to(tl.int64) * N + cols, scale, mask=cols < N)
        inv = inv[None, :]
        words = column_words(a, b, c, d, inv, col_ptr)
        store_transposed(col_ptr, words, base, col0, end, R, N, ALIGN, BLOCK_R, BLOCK_N)
        if row0 < head_end:
            head = load_edge(x_ptr, row0, head_end, cols, N, stride_x)
            store_edge(col_ptr, converted(head, inv, col_ptr), row0, head_end, cols, R, N)
        if (ALIGN % 4 == 0) & (tail < end):
            last = load_edge(x_ptr, tail, end, cols, N, stride_x)
            store_edge(col_ptr, converted(last, inv, col_ptr), tail, end, cols, R, N)
    else:
        at = scale_ptr + block.to(tl.int64) * N + cols
        tl.store(at, tl.full((BLOCK_N,), 1.0, tl.float32), mask=cols < N)
    used = tl.load(offs_ptr + E - 1)
    step = tl.num_programs(0) // num_n * PADDING
    for start in range(used + block * PADDING, R, step):
        rows = (start + tl.arange(0, PADDING)).to(tl.int64)
        here = (cols < N)[:, None] & (rows < R)[None, :]
        zeros = tl.zeros((BLOCK_N, PADDING), tl.float32).to(col_ptr.dtype.element_ty)
        tl.store(col_ptr + (cols * R)[:, None] + rows[None, :], zeros, mask=here)
