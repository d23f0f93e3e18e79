"""Expert-parallel dispatch and combine over peer memory: tokens and sums move by direct loads and stores, without NCCL.

`table` (W,) int64 holds the address of every rank's buffer. A buffer has two halves, used in turn: bit 0 of `uses`, a
count on the device, says which, so that a captured graph goes on alternating. A half holds, for each of W source ranks,
`capacity` slots: rows of N, then at `ids_at`, `weights_at` and `counts_at` (bytes) K expert ids and K
weights a slot, and one count a source rank. Row `src * capacity + slot` is the slot-th token that rank src sent.

send_tokens and return_sums write to peers, take_tokens and add_sums read the rank's own buffer; barriers between them
are the caller's. `overflow` is set on a rank that sends a peer more tokens than `capacity`, or has more rows than it
allocated; what it returns and adds is NaN from then on. METADATA: ids, weights and counts travel too, or the gradients
of weights, written by programs of the first column block alone.
"""

import triton
import triton.language as tl


@triton.jit
def peer_ptr(table_ptr, rank, uses_ptr, half, offset, dtype: tl.constexpr):
    """Return a pointer into the half in use of a rank's buffer, `offset` bytes behind its begin; `half` is its size."""
    address = tl.load(table_ptr + rank) + (tl.load(uses_ptr) & 1) * half + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["T"])
def token_slots_kernel(
    experts_ptr, slots_ptr, counts_ptr, T, E, W,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """slots (T, W): the position of a token among those that go to a rank, or -1; counts (W,). One program a rank.

    A prefix sum over blocks of BLOCK_T tokens, so slots are in the order of tokens. A token goes to a rank if one of
    its K experts lives there.
    """
    rank = tl.program_id(0)
    first_expert, end_expert = rank * (E // W), (rank + 1) * (E // W)
    k = tl.arange(0, BLOCK_K)[None, :]
    count = 0
    for start in range(0, T, BLOCK_T):
        tokens = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (tokens < T)[:, None] & (k < K)
        expert_ids = tl.load(experts_ptr + (tokens * K)[:, None] + k, mask=mask, other=-1)
        is_sent = tl.max(
            ((expert_ids >= first_expert) & (expert_ids < end_expert)).to(tl.int32), axis=1
        )
        slots = count + tl.cumsum(is_sent, 0) - 1
        tl.store(slots_ptr + tokens * W + rank, tl.where(is_sent > 0, slots, -1), mask=tokens < T)
        count += tl.sum(is_sent, axis=0)
    tl.store(counts_ptr + rank, count)


@triton.jit(do_not_specialize=["T", "rank"])
def send_tokens_kernel(
    x_ptr, slots_ptr, table_ptr, uses_ptr, overflow_ptr, counts_ptr, experts_ptr, weights_ptr,
    T, N, E, stride_x, rank, capacity, half, ids_at, weights_at, counts_at,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, METADATA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write tokens into peers' buffers. A program loads a tile of tokens once and stores it to all W ranks, masked."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    token_mask = tokens < T
    x = tl.load(
        x_ptr + (tokens * stride_x)[:, None] + cols,
        mask=token_mask[:, None] & (cols < N),
        other=0.0,
    )
    k = tl.arange(0, BLOCK_K)[None, :]
    copy_offsets = (tokens * K)[:, None] + k
    for dst_rank in tl.static_range(W):
        slots = tl.load(slots_ptr + tokens * W + dst_rank, mask=token_mask, other=-1)
        slot_mask = ((slots >= 0) & (slots < capacity))[:, None]
        rows = (slots + rank * capacity).to(tl.int64)[:, None]
        dst_ptr = peer_ptr(table_ptr, dst_rank, uses_ptr, half, 0, x_ptr.dtype.element_ty)
        tl.store(dst_ptr + rows * N + cols, x, mask=slot_mask & (cols < N))
        if METADATA:
            if pid % num_n == 0:
                expert_ids = tl.load(
                    experts_ptr + copy_offsets, mask=token_mask[:, None] & (k < K), other=-1
                )
                expert_ids = expert_ids.to(tl.int32) - dst_rank * (E // W)
                expert_ids = tl.where((expert_ids >= 0) & (expert_ids < E // W), expert_ids, -1)
                dst_ids_ptr = peer_ptr(table_ptr, dst_rank, uses_ptr, half, ids_at, tl.int32)
                tl.store(dst_ids_ptr + rows * K + k, expert_ids, mask=slot_mask & (k < K))
                weights = tl.load(
                    weights_ptr + copy_offsets, mask=token_mask[:, None] & (k < K), other=0.0
                )
                dst_weights_ptr = peer_ptr(
                    table_ptr, dst_rank, uses_ptr, half, weights_at, tl.float32
                )
                tl.store(dst_weights_ptr + rows * K + k, weights, mask=slot_mask & (k < K))
            if pid == 0:
                count = tl.load(counts_ptr + dst_rank)
                dst_counts_ptr = peer_ptr(table_ptr, dst_rank, uses_ptr, half, counts_at, tl.int32)
                tl.store(dst_counts_ptr + rank, tl.minimum(count, capacity))
                if count > capacity:
                    tl.store(overflow_ptr, 1)


@triton.jit(do_not_specialize=["rank", "blocks"])
def take_tokens_kernel(
    y_ptr, table_ptr, uses_ptr, ids_ptr, weights_ptr, arrivals_ptr,
    N, rank, capacity, half, ids_at, weights_at, counts_at, blocks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, METADATA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy what a rank sent from this rank's buffer to y (W capacity, N), a tile a program; zeros in free slots."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    src_rank = pid // (num_n * blocks)
    first_slot = (pid // num_n % blocks) * BLOCK_R
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    slots = first_slot + tl.arange(0, BLOCK_R)
    if METADATA:
        counts_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, counts_at, tl.int32)
        count = tl.load(counts_ptr + src_rank)
        if pid % (num_n * blocks) == 0:
            tl.store(arrivals_ptr + src_rank, count)
    else:
        count = tl.load(arrivals_ptr + src_rank)
    slot_mask, filled_mask = (slots < capacity)[:, None], (slots < count)[:, None]
    rows = (slots + src_rank * capacity).to(tl.int64)[:, None]
    src_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, 0, y_ptr.dtype.element_ty)
    x = tl.load(src_ptr + rows * N + cols, mask=filled_mask & (cols < N), other=0.0)
    tl.store(y_ptr + rows * N + cols, x, mask=slot_mask & (cols < N))
    if METADATA:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            src_ids_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, ids_at, tl.int32)
            expert_ids = tl.load(src_ids_ptr + rows * K + k, mask=filled_mask & (k < K), other=-1)
            tl.store(ids_ptr + rows * K + k, expert_ids, mask=slot_mask & (k < K))
            src_weights_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, weights_at, tl.float32)
            weights = tl.load(src_weights_ptr + rows * K + k, mask=filled_mask & (k < K), other=0.0)
            tl.store(weights_ptr + rows * K + k, weights, mask=slot_mask & (k < K))


@triton.jit(do_not_specialize=["rank", "blocks"])
def return_sums_kernel(
    x_ptr, table_ptr, uses_ptr, overflow_ptr, arrivals_ptr, dweights_ptr,
    N, stride_x, rank, capacity, half, weights_at, blocks,
    K: tl.constexpr, BLOCK_K: tl.constexpr, METADATA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write sums back into the buffer of the rank that their tokens came from, a tile a program; NaN on overflow."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    dst_rank = pid // (num_n * blocks)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    slots = (pid // num_n % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    filled_mask = (slots < tl.load(arrivals_ptr + dst_rank))[:, None]
    local_rows = (slots + dst_rank * capacity).to(tl.int64)[:, None]
    remote_rows = (slots + rank * capacity).to(tl.int64)[:, None]
    x = tl.load(x_ptr + local_rows * stride_x + cols, mask=filled_mask & (cols < N), other=0.0)
    x = tl.where(tl.load(overflow_ptr) != 0, float("nan"), x.to(tl.float32)).to(x.dtype)
    dst_ptr = peer_ptr(table_ptr, dst_rank, uses_ptr, half, 0, x_ptr.dtype.element_ty)
    tl.store(dst_ptr + remote_rows * N + cols, x, mask=filled_mask & (cols < N))
    if METADATA:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            dweights = tl.load(
                dweights_ptr + local_rows * K + k, mask=filled_mask & (k < K), other=0.0
            )
            dst_dweights_ptr = peer_ptr(table_ptr, dst_rank, uses_ptr, half, weights_at, tl.float32)
            tl.store(dst_dweights_ptr + remote_rows * K + k, dweights, mask=filled_mask & (k < K))


@triton.jit(do_not_specialize=["T", "rank"])
def add_sums_kernel(
    y_ptr, slots_ptr, table_ptr, uses_ptr, overflow_ptr, experts_ptr, dweights_ptr,
    T, N, E, rank, capacity, half, weights_at,
    W: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, METADATA: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y (T, N): add the sums that came back for a token, in the order of ranks, in float32; NaN on overflow."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    token_mask = tokens < T
    sums_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, 0, y_ptr.dtype.element_ty)
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for src_rank in tl.static_range(W):
        slots = tl.load(slots_ptr + tokens * W + src_rank, mask=token_mask, other=-1)
        slot_mask = ((slots >= 0) & (slots < capacity))[:, None]
        rows = (slots + src_rank * capacity).to(tl.int64)[:, None]
        acc += tl.load(sums_ptr + rows * N + cols, mask=slot_mask & (cols < N), other=0.0).to(
            tl.float32
        )
    acc = tl.where(tl.load(overflow_ptr) != 0, float("nan"), acc)
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (tokens * N)[:, None] + cols, y, mask=token_mask[:, None] & (cols < N))
    if METADATA:
        if pid % num_n == 0:
            k = tl.arange(0, BLOCK_K)[None, :]
            copy_offsets = (tokens * K)[:, None] + k
            expert_ids = tl.load(
                experts_ptr + copy_offsets, mask=token_mask[:, None] & (k < K), other=-1
            ).to(tl.int32)
            expert_rank = tl.where(expert_ids >= 0, expert_ids // (E // W), 0)
            slot = tl.load(
                slots_ptr + (tokens * W)[:, None] + expert_rank, mask=expert_ids >= 0, other=-1
            )
            src_dweights_ptr = peer_ptr(table_ptr, rank, uses_ptr, half, weights_at, tl.float32)
            row = (slot + expert_rank * capacity).to(tl.int64)
            dweights = tl.load(
                src_dweights_ptr + row * K + k, mask=(slot >= 0) & (slot < capacity), other=0.0
            )
            tl.store(dweights_ptr + copy_offsets, dweights, mask=token_mask[:, None] & (k < K))


@triton.jit
def bound_rows_kernel(offs_ptr, overflow_ptr, E, rows, BLOCK_E: tl.constexpr):
    """Clamp group ends to the rows that there are, and set `overflow` where one was beyond."""
    groups = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + groups, mask=groups < E, other=0)
    tl.store(offs_ptr + groups, tl.minimum(ends, rows), mask=groups < E)
    if tl.max(ends, axis=0) > rows:
        tl.store(overflow_ptr, 1)
