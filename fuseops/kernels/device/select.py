"""Selection and sorting networks over tuples of int32 tensors, for top-k routing and for the order of copies. Triton.

Each tensor of a tuple holds one list element of every thread, so that a compare-exchange of two tensors is one min and
one max in registers, without shuffles and without branches. Only the last levels cross lanes: rows are spread over few
threads of a warp, and a reshape (W / 2, 2) with a reduction over the 2 becomes a shuffle.

Keys are int32 in the order of floats; their lowest bits may hold an index (`pack_index`), which travels with the key
for nothing and makes keys of a row distinct.

Traps: tuples grow in loops, so loops are `tl.static_range` and N, L powers of two; a tuple of 64 tensors is 64
registers a thread.
"""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

KEY_MIN: tl.constexpr = tl.constexpr(-2147483648)
NO_KEY: tl.constexpr = tl.constexpr(-2147483648 + 4096)
"""The key of "nothing was rejected": above KEY_MIN whatever index (below 4096) is in its lowest bits."""


@triton.jit
def bitonic_merge(x, N: tl.constexpr):
    """Sort a bitonic tuple of N tensors in descending order, elementwise: log2(N) levels of compare-exchange."""
    if N == 1:
        return x
    else:
        upper = ()
        lower = ()
        for i in tl.static_range(N // 2):
            upper = upper + (tl.maximum(x[i], x[i + N // 2]),)
            lower = lower + (tl.minimum(x[i], x[i + N // 2]),)
        return bitonic_merge(upper, N // 2) + bitonic_merge(lower, N // 2)


@triton.jit
def odd_even_merge(a, b, N: tl.constexpr):
    """Merge two descending tuples of N tensors into one of 2 N, elementwise (odd-even merge, Batcher 1968)."""
    if N == 1:
        return (tl.maximum(a[0], b[0]), tl.minimum(a[0], b[0]))
    else:
        even = odd_even_merge(a[::2], b[::2], N // 2)
        odd = odd_even_merge(a[1::2], b[1::2], N // 2)
        merged = (even[0],)
        for i in tl.static_range(N - 1):
            merged = merged + (tl.maximum(odd[i], even[i + 1]), tl.minimum(odd[i], even[i + 1]))
        return merged + (odd[N - 1],)


@triton.jit
def select_top(x, N: tl.constexpr, L: tl.constexpr):
    """Select the L largest of a tuple of N int32 tensors, elementwise, by a pruned merge sort: only what can still be
    among the L is carried from level to level.   -> (the L largest, or all N, in descending order; the largest that was
    rejected, NO_KEY if nothing was)
    """
    if N == 1:
        return x, tl.full(x[0].shape, NO_KEY, dtype=tl.int32)
    else:
        a, max_rejected = select_top(x[: N // 2], N // 2, L)
        b, max_rejected_b = select_top(x[N // 2 :], N // 2, L)
        max_rejected = tl.maximum(max_rejected, max_rejected_b)
        if N <= L:
            return odd_even_merge(a, b, N // 2), max_rejected
        else:
            bitonic = ()
            for i in tl.static_range(L):
                bitonic = bitonic + (tl.maximum(a[i], b[L - 1 - i]),)
                max_rejected = tl.maximum(max_rejected, tl.minimum(a[i], b[L - 1 - i]))
            return bitonic_merge(bitonic, L), max_rejected


@triton.jit
def select_top_across_lanes(x, max_rejected, L: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Select the L largest of each row, across its W lanes, of L sorted tensors (R, W) and what these rejected (R, W).
    -> (L tensors (R,), in descending order; the largest that was rejected (R,))

    A tournament: of two neighbouring lanes the descending list of one against the reversed list of the other is
    bitonic, so that its elementwise maxima are the L largest of both, and log2(L) more levels sort them.
    """
    larger = ()
    if W == 1:
        for i in tl.static_range(L):
            larger = larger + (tl.reshape(x[i], (R,)),)
        return larger, tl.reshape(max_rejected, (R,))
    else:
        # every other list is reversed: bitonic pairs
        odd_list = tl.arange(0, 2)[None, None, :] == 1
        max_rejected = tl.max(tl.reshape(max_rejected, (R, W // 2, 2)), axis=2)
        for i in tl.static_range(L):
            forward = tl.reshape(x[i], (R, W // 2, 2))
            reversed_ = tl.reshape(x[L - 1 - i], (R, W // 2, 2))
            pairs = tl.where(odd_list, reversed_, forward)
            larger = larger + (tl.max(pairs, axis=2),)
            max_rejected = tl.maximum(max_rejected, tl.min(pairs, axis=2))
        return select_top_across_lanes(bitonic_merge(larger, L), max_rejected, L, R, W // 2)


@triton.jit
def deinterleave_by_4(x, R: tl.constexpr, W: tl.constexpr):
    """Split (R, 4 W) into four tensors (R, W), of every fourth column: registers only, where a thread holds four in a
    row.
    """
    ac, bd = tl.split(tl.reshape(x, (R, W, 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return (a, b, c, d)


@triton.jit
def unstack_rows(x, N: tl.constexpr, R: tl.constexpr):
    """Split (N, R) into its N rows (R,), each spread over all threads."""
    if N == 1:
        return (tl.reshape(x, (R,)),)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (2, N // 2, R)), (1, 2, 0)))
        return unstack_rows(a, N // 2, R) + unstack_rows(b, N // 2, R)


@triton.jit
def select_top_of_rows(keys, N: tl.constexpr, R: tl.constexpr, W: tl.constexpr, L: tl.constexpr):
    """Select the L largest of each row of N tensors (R, W): first among the N of each lane, in registers, then across
    the W lanes of the row, by shuffles.   -> (L tensors (R,), in descending order; the largest that was rejected (R,))
    """
    in_lane, max_rejected = select_top(keys, N, L)
    top = ()
    for i in tl.static_range(L):
        if i < N:
            top = top + (in_lane[i],)
        else:
            top = top + (tl.full((R, W), KEY_MIN, dtype=tl.int32),)
    return select_top_across_lanes(top, max_rejected, L, R, W)


@triton.jit
def pack_index(key, index, INDEX_MASK: tl.constexpr):
    """Replace the lowest bits of keys with their index, complemented: no two keys of a row are equal, and of keys that
    differ in these bits alone that of the lower index is the larger.
    """
    return (key & ~INDEX_MASK) | (INDEX_MASK - index)


@triton.jit
def pack_expert_ids(
    pieces,
    first_experts,
    INDEX_MASK: tl.constexpr,
    PIECES: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Pack expert ids into the lowest bits of PIECES pieces (R, 4 W) of keys, whose quads are of the experts from
    `first_experts` (R, W) on.   -> 4 PIECES tensors (R, W)
    """
    keys = ()
    for p in tl.static_range(PIECES):
        in_quad = deinterleave_by_4(pieces[p], R, W)
        for j in tl.static_range(4):
            keys = keys + (pack_index(in_quad[j], first_experts[p] + j, INDEX_MASK),)
    return keys


@triton.jit
def compare_exchange_neighbours(logits, experts, ODD: tl.constexpr, N: tl.constexpr):
    """Order neighbours of N logits (R,) and their experts by one step of an odd-even transposition sort: those at (0,
    1), (2, 3), ..., or with ODD those at (1, 2), (3, 4), ...
    """
    sorted_logits = ()
    sorted_experts = ()
    for i in tl.static_range(N):
        if (i + ODD) % 2 == 0 and i + 1 < N:
            swap = logits[i + 1] > logits[i]
            sorted_logits = sorted_logits + (tl.where(swap, logits[i + 1], logits[i]),)
            sorted_experts = sorted_experts + (tl.where(swap, experts[i + 1], experts[i]),)
        elif (i + ODD) % 2 == 1 and i > 0:
            swap = logits[i] > logits[i - 1]
            sorted_logits = sorted_logits + (tl.where(swap, logits[i - 1], logits[i]),)
            sorted_experts = sorted_experts + (tl.where(swap, experts[i - 1], experts[i]),)
        else:
            sorted_logits = sorted_logits + (logits[i],)
            sorted_experts = sorted_experts + (experts[i],)
    return sorted_logits, sorted_experts


@triton.jit
def resolve_ties_by_logits(
    tile_ptr, row_offset, keys, top, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    INDEX_MASK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Take the K largest of N packed keys, tensors (R, 1) or wider, from `top`, the sorted K + 1 largest, and order by
    their logits what ties but for the index bits.   -> (K logits (R,), K experts (R,), rows that stay ambiguous (R,))

    Two neighbours that tie are ordered by one comparison of their logits, also the K-th with the one behind it. Of
    three that tie the network may have chosen or ordered the wrong ones: such a row is ambiguous, and routed again.
    """
    logits = ()
    experts = ()
    CANDIDATES: tl.constexpr = min(K + 1, E)
    for i in tl.static_range(CANDIDATES):
        expert = tl.minimum(INDEX_MASK - (top[i] & INDEX_MASK), E - 1)
        experts = experts + (expert,)
        logits = logits + (tl.load(tile_ptr + row_offset + expert).to(tl.float32),)
    logits, experts = compare_exchange_neighbours(logits, experts, 0, CANDIDATES)
    logits, experts = compare_exchange_neighbours(logits, experts, 1, CANDIDATES)
    ambiguous = tl.zeros((R,), dtype=tl.int1)
    for i in tl.static_range(K - 1):
        ambiguous = ambiguous | ((top[i] | INDEX_MASK) == (top[i + 2] | INDEX_MASK))
    kth_key = top[K - 1] | INDEX_MASK
    tied_at_k = kth_key == (top[K] | INDEX_MASK)
    if tl.max(tied_at_k.to(tl.int32), axis=0) > 0:
        num_tied = tl.zeros((R,), dtype=tl.int32)
        for i in tl.static_range(N):
            num_tied += tl.sum(((keys[i] | INDEX_MASK) == kth_key[:, None]).to(tl.int32), axis=1)
        ambiguous = ambiguous | (tied_at_k & (num_tied > 2))
    return logits[:K], experts[:K], ambiguous


@triton.jit
def stack_columns(x, N: tl.constexpr, R: tl.constexpr):
    """Stack N tensors (R,) as the columns of one (R, N); a thread holds a row."""
    if N == 1:
        return x[0][:, None]
    else:
        even, odd = stack_columns(x[::2], N // 2, R), stack_columns(x[1::2], N // 2, R)
        return tl.reshape(tl.join(even, odd), (R, N))


@triton.jit
def stack_tile(x, N: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stack N tensors (R,) as the columns of a tile (R, BLOCK_N), padded with copies of the first."""
    columns = x
    for _ in tl.static_range(N, BLOCK_N):
        columns = columns + (x[0],)
    return stack_columns(columns, BLOCK_N, R)


@triton.jit
def topk_by_repeated_max(
    keys, cols, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Find the K largest keys of each row (BLOCK_R, BLOCK_E) exactly, by K argmax reductions that mask what they found;
    the lower expert first among equals.   -> experts (BLOCK_R, BLOCK_K)
    """
    remaining = tl.where(cols < E, keys, KEY_MIN)
    experts = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.int32)
    slots = tl.arange(0, BLOCK_K)[None, :]
    for k in range(K):
        top = tl.max(remaining, axis=1)[:, None]
        best = tl.min(tl.where(remaining == top, cols, BLOCK_E), axis=1)[:, None]
        experts = tl.where(slots == k, best, experts)
        remaining = tl.where(cols == best, KEY_MIN, remaining)
    return experts


@triton.jit
def compare_exchange_threads(x, N: tl.constexpr, T: tl.constexpr, STRIDE: tl.constexpr):
    """Compare-exchange N tensors (T,) between threads: of two threads STRIDE apart the lower gets the maximum, the
    upper the minimum. Each is a shuffle within the warp.
    """
    is_lower = tl.arange(0, 2)[None, :, None] == 0
    exchanged = ()
    for i in tl.static_range(N):
        pair = tl.reshape(x[i], (T // (2 * STRIDE), 2, STRIDE))
        larger, smaller = tl.max(pair, axis=1)[:, None, :], tl.min(pair, axis=1)[:, None, :]
        exchanged = exchanged + (tl.reshape(tl.where(is_lower, larger, smaller), (T,)),)
    return exchanged


@triton.jit
def xor_all(x, N: tl.constexpr, mask):
    """Complement N tensors where the mask is -1, and keep them where it is 0: complements are in the opposite order."""
    flipped = ()
    for i in tl.static_range(N):
        flipped = flipped + (x[i] ^ mask,)
    return flipped


@triton.jit
def bitonic_sort_by_threads(x, T: tl.constexpr):
    """Sort int32 (8 T,) in ascending order, eight a thread of T threads of one warp: a bitonic sort (Batcher 1968).

    Each thread sorts its eight in registers, then lists of 8 to 4 T are merged, level by level. The network knows
    descending lists only: where one has to ascend, every other list of a level, its complements descend. The input is
    complemented as a whole, and again at the end, because the result ascends.
    """
    thread = tl.arange(0, T)
    a, b, c, d = deinterleave_by_4(tl.reshape(~x, (2, 4 * T)), 2, T)
    a, e = tl.split(tl.trans(a))
    b, f = tl.split(tl.trans(b))
    c, g = tl.split(tl.trans(c))
    d, h = tl.split(tl.trans(d))
    flip = -(thread & 1)
    y, _ = select_top(xor_all((a, b, c, d, e, f, g, h), 8, flip), 8, 8)
    for level in tl.static_range(1, 6):
        if 1 << level <= T:
            next_flip = -((thread >> level) & 1)
            y = xor_all(y, 8, flip ^ next_flip)
            flip = next_flip
            for m in tl.static_range(level):
                y = compare_exchange_threads(y, 8, T, 1 << (level - 1 - m))
            y = bitonic_merge(y, 8)
    even = tl.join(tl.join(y[0], y[4]), tl.join(y[2], y[6]))
    odd = tl.join(tl.join(y[1], y[5]), tl.join(y[3], y[7]))
    return ~tl.reshape(tl.join(even, odd), (8 * T,))
