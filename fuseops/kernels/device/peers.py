"""Kernels of fuseops.kernels.peers."""

import triton
import triton.language as tl


@triton.jit
def part_of(table_ptr, rank, uses_ptr, half, at, dtype: tl.constexpr):
    """Where a part of the half in use of a rank's buffer begins."""
    address = tl.load(table_ptr + rank) + (tl.load(uses_ptr) & 1) * half + at
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["T"])
def token_slots_kernel(
    experts_ptr, slots_ptr, counts_ptr, T, E, W,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program counts the tokens that go to one rank, in their order."""
    rank = tl.program_id(0)
    first, last = rank * (E // W), (rank + 1) * (E // W)
    k = tl.arange(0, BLOCK_K)[None, :]
    count = 0
    for start in range(0, T, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        mask = (tokens < T)[:, None] & (k < K)
        e = tl.load(experts_ptr + (tokens * K)[:, None] + k, mask=mask, other=-1)
        goes = tl.max(((e >= first) & (e < last)).to(tl.int32), axis=1)
        slots = count + tl.cumsum(goes, 0) - 1
        tl.store(slots_ptr + tokens * W + rank, tl.where(goes > 0, slots, -1), mask=tokens < T)
        count += tl.sum(goes, axis=0)
    tl.store(counts_ptr + rank, count)


@triton.jit(do_not_specialize=["T", "rank"])
def send_tokens_kernel(
    x_ptr, slots_ptr, table_ptr, uses_ptr, flag_ptr, counts_ptr, experts_ptr, weights_ptr,
    T, N, E, stride_x, rank, room, half, ids_at, weights_at, counts_at,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program reads a tile of tokens once and writes it to every rank that one of them goes to."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    here = tokens < T
    x = tl.load(
        x_ptr + (tokens * stride_x)[:, None] + cols, mask=here[:, None] & (cols < N), other=0.0
    )
    k = tl.arange(0, BLOCK_K)[None, :]
    at = (tokens * K)[:, None] + k
    for to in tl.static_range(W):
        slots = tl.load(slots_ptr + tokens * W + to, mask=here, other=-1)
        kept = ((slots >= 0) & (slots < room))[:, None]
        rows = (slots + rank * room).to(tl.int64)[:, None]
        y_ptr = part_of(table_ptr, to, uses_ptr, half, 0, x_ptr.dtype.element_ty)
        tl.store(y_ptr + rows * N + cols, x, mask=kept & (cols < N))
        if HEADS:
            if pid % num_n == 0:
                e = tl.load(experts_ptr + at, mask=here[:, None] & (k < K), other=-1)
                e = e.to(tl.int32) - to * (E // W)
                e = tl.where((e >= 0) & (e < E // W), e, -1)
                ids_ptr = part_of(table_ptr, to, uses_ptr, half, ids_at, tl.int32)
                tl.store(ids_ptr + rows * K + k, e, mask=kept & (k < K))
                w = tl.load(weights_ptr + at, mask=here[:, None] & (k < K), other=0.0)
                w_ptr = part_of(table_ptr, to, uses_ptr, half, weights_at, tl.float32)
                tl.store(w_ptr + rows * K + k, w, mask=kept & (k < K))
            if pid == 0:
                count = tl.load(counts_ptr + to)
                counts_to = part_of(table_ptr, to, uses_ptr, half, counts_at, tl.int32)
                tl.store(counts_to + rank, tl.minimum(count, room))
                if count > room:
                    tl.store(flag_ptr, 1)


@triton.jit(do_not_specialize=["rank", "blocks"])
def take_tokens_kernel(
    y_ptr, table_ptr, uses_ptr, ids_ptr, weights_ptr, arrivals_ptr,
    N, rank, room, half, ids_at, weights_at, counts_at, blocks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program copies a tile of what one rank has written here; zeros where that has nothing."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    source = pid // (num_n * blocks)
    first = (pid // num_n % blocks) * BLOCK_R
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    slots = first + tl.arange(0, BLOCK_R)
    if HEADS:
        counts_from = part_of(table_ptr, rank, uses_ptr, half, counts_at, tl.int32)
        count = tl.load(counts_from + source)
        if pid % (num_n * blocks) == 0:
            tl.store(arrivals_ptr + source, count)
    else:
        count = tl.load(arrivals_ptr + source)
    there, full = (slots < room)[:, None], (slots < count)[:, None]
    rows = (slots + source * room).to(tl.int64)[:, None]
    x_ptr = part_of(table_ptr, rank, uses_ptr, half, 0, y_ptr.dtype.element_ty)
    x = tl.load(x_ptr + rows * N + cols, mask=full & (cols < N), other=0.0)
    tl.store(y_ptr + rows * N + cols, x, mask=there & (cols < N))
    if HEADS:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            e_ptr = part_of(table_ptr, rank, uses_ptr, half, ids_at, tl.int32)
            e = tl.load(e_ptr + rows * K + k, mask=full & (k < K), other=-1)
            tl.store(ids_ptr + rows * K + k, e, mask=there & (k < K))
            w_ptr = part_of(table_ptr, rank, uses_ptr, half, weights_at, tl.float32)
            w = tl.load(w_ptr + rows * K + k, mask=full & (k < K), other=0.0)
            tl.store(weights_ptr + rows * K + k, w, mask=there & (k < K))


@triton.jit(do_not_specialize=["rank", "blocks"])
def return_sums_kernel(
    x_ptr, table_ptr, uses_ptr, flag_ptr, arrivals_ptr, dweights_ptr,
    N, stride_x, rank, room, half, weights_at, blocks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program writes a tile of sums to the rank whose tokens they are of; NaN where this one ran out of room."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    to = pid // (num_n * blocks)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    slots = (pid // num_n % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    full = (slots < tl.load(arrivals_ptr + to))[:, None]
    mine = (slots + to * room).to(tl.int64)[:, None]
    theirs = (slots + rank * room).to(tl.int64)[:, None]
    x = tl.load(x_ptr + mine * stride_x + cols, mask=full & (cols < N), other=0.0)
    x = tl.where(tl.load(flag_ptr) != 0, float("nan"), x.to(tl.float32)).to(x.dtype)
    y_ptr = part_of(table_ptr, to, uses_ptr, half, 0, x_ptr.dtype.element_ty)
    tl.store(y_ptr + theirs * N + cols, x, mask=full & (cols < N))
    if HEADS:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            w = tl.load(dweights_ptr + mine * K + k, mask=full & (k < K), other=0.0)
            w_ptr = part_of(table_ptr, to, uses_ptr, half, weights_at, tl.float32)
            tl.store(w_ptr + theirs * K + k, w, mask=full & (k < K))


@triton.jit(do_not_specialize=["T", "rank"])
def add_sums_kernel(
    y_ptr, slots_ptr, table_ptr, uses_ptr, flag_ptr, experts_ptr, dweights_ptr,
    T, N, E, rank, room, half, weights_at,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of a token are added in the order of ranks; NaN where this one had no room for what it sent."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    here = tokens < T
    x_ptr = part_of(table_ptr, rank, uses_ptr, half, 0, y_ptr.dtype.element_ty)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for source in tl.static_range(W):
        slots = tl.load(slots_ptr + tokens * W + source, mask=here, other=-1)
        kept = ((slots >= 0) & (slots < room))[:, None]
        rows = (slots + source * room).to(tl.int64)[:, None]
        total += tl.load(x_ptr + rows * N + cols, mask=kept & (cols < N), other=0.0).to(tl.float32)
    total = tl.where(tl.load(flag_ptr) != 0, float("nan"), total)
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (tokens * N)[:, None] + cols, y, mask=here[:, None] & (cols < N))
    if HEADS:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            at = (tokens * K)[:, None] + k
            e = tl.load(experts_ptr + at, mask=here[:, None] & (k < K), other=-1).to(tl.int32)
            home = tl.where(e >= 0, e // (E // W), 0)
            slot = tl.load(slots_ptr + (tokens * W)[:, None] + home, mask=e >= 0, other=-1)
            w_ptr = part_of(table_ptr, rank, uses_ptr, half, weights_at, tl.float32)
            row = (slot + home * room).to(tl.int64)
            w = tl.load(w_ptr + row * K + k, mask=(slot >= 0) & (slot < room), other=0.0)
            tl.store(dweights_ptr + at, w, mask=here[:, None] & (k < K))


@triton.jit
def bound_rows_kernel(offs_ptr, flag_ptr, E, rows, BLOCK_E: tl.constexpr):
    """Ends beyond the rows there are become the last one, and are noted."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=0)
    tl.store(offs_ptr + e, tl.minimum(ends, rows), mask=e < E)
    if tl.max(ends, axis=0) > rows:
        tl.store(flag_ptr, 1)
