"""Kernels of fuseops.kernels.router. BLOCK_E holds all experts of a token.

The forward has two ways to the K largest keys. The fast one gives a token to BLOCK_P / 4 threads, and
runs a selection network over what they hold: all of it is minima and maxima of int32. Of many experts it
first finds the K quads, four experts side by side, with the largest of all logits, and looks for the K
largest logits in those alone, a token a thread where the rows were read by more threads than K. The network
compares all but the lowest bits, which hold experts; logits settle the order of two that differ there alone. It
knows where it may still be wrong, and goes the slow way for such a token, K times the maximum of its row,
as it does for all where BLOCK_P is 0.
"""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

from fuseops.kernels.device.select import (
    LOWEST,
    largest_of,
    largest_of_pieces,
    largest_of_rows,
    numbered,
    numbered_pieces,
    quarters,
    rows_of,
    top_one_by_one,
)

TINY: tl.constexpr = tl.constexpr(1e-20)


@triton.jit
def load_logits(at, mask, cols, E):
    """float32 logits, -inf beyond the experts, 0 beyond the tokens (where -inf would give NaN)."""
    return tl.where(cols < E, tl.load(at, mask=mask, other=0.0).to(tl.float32), float("-inf"))


@triton.jit
def softmax_terms(logits):
    """(largest logit, sum of the exponentials) of each row of a float32 tile, as columns."""
    largest = tl.max(logits, axis=1)[:, None]
    return largest, tl.sum(tl.exp(logits - largest), axis=1)[:, None]


@triton.jit
def exponentials(x, PIECES: tl.constexpr):
    """(largest, sum of the exponentials, the exponentials) of the rows of a tuple of tiles."""
    largest = x[0]
    for p in tl.static_range(1, PIECES):
        largest = tl.maximum(largest, x[p])
    largest = tl.max(largest, axis=1)[:, None]
    y = (tl.exp(x[0] - largest),)
    total = y[0]
    for p in tl.static_range(1, PIECES):
        y = y + (tl.exp(x[p] - largest),)
        total += y[p]
    return largest, tl.sum(total, axis=1)[:, None], y


@triton.jit
def scores_of(logits, largest, total, SOFTMAX: tl.constexpr):
    """Scores of float32 logits; ``softmax_terms`` are of all logits of the token."""
    if SOFTMAX:
        return tl.exp(logits - largest) / total
    else:
        return tl.sigmoid(logits)


@triton.jit
def order_of(key):
    """int32 in the order of float32 keys, above LOWEST; NaN is the largest, as inf, and -0 is 0."""
    bits = tl.minimum(key + 0.0, float("inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def float_of(order):
    """The inverse of order_of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_quads(
    first, offset, pieces, K: tl.constexpr, P: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Keys of the L quads of experts (four in a row) whose largest logits are largest: those hold the
    L largest logits.   -> (keys (R, 4 V) in L / V pieces, the first expert of each quad, the largest key
    of the other quads, whether one of those may belong here), of P pieces (R, 4 W) of the rows of logits
    at `first` + `offset` (R,)
    """
    LOW: tl.constexpr = P * W - 1
    lane = tl.arange(0, W)[None, :]
    tops = ()
    for p in tl.static_range(P):
        a, b, c, d = quarters(pieces[p], R, W)
        top = nan_maximum(nan_maximum(a, b), nan_maximum(c, d))
        top = numbered(order_of(top), W * p + lane, LOW)
        tops = tops + (rows_of(tl.trans(top), W, R) if V < W else (top,))
    if V < W:
        top, left = largest_of(tops, P * W, L)
    else:
        top, left = largest_of_pieces(tops, P, R, W, L)
    gap = (top[K - 1] ^ left).to(tl.uint32, bitcast=True)
    lane = tl.arange(0, V)[None, :]
    each = tl.arange(0, 4)[None, None, :]
    keys = ()
    firsts = ()
    for q in tl.static_range(L // V):
        quad = tl.zeros((R, V), dtype=tl.int32)
        for w in tl.static_range(V):
            quad = tl.where(lane == w, 4 * (LOW - (top[q * V + w] & LOW))[:, None], quad)
        cols = quad[:, :, None] + each
        at = first + offset[:, None, None] + cols
        if E % 4 == 0:  # there are as many whole quads as that
            keys = keys + (order_of(tl.load(at).to(tl.float32)),)
        else:
            x = tl.load(at, mask=cols < E, other=0.0).to(tl.float32)
            keys = keys + (tl.where(cols < E, order_of(x), LOWEST),)
        firsts = firsts + (quad,)
    return keys, firsts, left, gap <= LOW


@triton.jit
def in_best_groups(
    key, cols, E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Which experts lie in the TOP_GROUPS groups with the largest sums of their two best keys; the
    lower group first among equals.
    """
    slots = tl.arange(0, BLOCK_E)[None, :]  # one a group: there are no more groups than experts
    group = cols // (E // GROUPS)
    worth = tl.full((BLOCK_R, BLOCK_E), LOWEST, dtype=tl.int32)
    for g in tl.static_range(GROUPS):
        own = tl.where((group == g) & (cols < E), key, float("-inf"))
        best = tl.max(own, axis=1)[:, None]
        at = tl.min(tl.where((own == best) & (group == g), cols, BLOCK_E), axis=1)[:, None]
        second = tl.max(tl.where(cols == at, float("-inf"), own), axis=1)[:, None]
        worth = tl.where(slots == g, order_of(tl.where(E > GROUPS, best + second, best)), worth)
    allowed = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(worth, axis=1)[:, None]
        best = tl.min(tl.where(worth == top, slots, BLOCK_E), axis=1)[:, None]
        allowed = allowed | (group == best)
        worth = tl.where(slots == best, LOWEST, worth)
    return allowed


@triton.jit
def of_best_groups(
    keys, EACH: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    R: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Pieces of int32 keys, LOWEST where the group of EACH experts is not among the best."""
    W: tl.constexpr = BLOCK_P // 4
    OWN: tl.constexpr = EACH // BLOCK_P
    worth = ()
    for g in tl.static_range(GROUPS):
        own = ()
        for p in tl.static_range(OWN):
            own = own + quarters(keys[g * OWN + p], R, W)
        own, left = largest_of(own, 4 * OWN, 2)
        best, _ = largest_of_rows(own, left, 2, R, W)
        worth = worth + (order_of(float_of(best[0]) + float_of(best[1])),)
    kept = ()
    for p in tl.static_range(PIECES):
        if p < GROUPS * OWN:
            mine = worth[p // OWN]
            better = tl.zeros((R,), dtype=tl.int32)
            for g in tl.static_range(GROUPS):
                if g * OWN > p:
                    better += (worth[g] > mine).to(tl.int32)
                elif (g + 1) * OWN <= p:
                    better += (worth[g] >= mine).to(tl.int32)
            kept = kept + (tl.where((better < TOP_GROUPS)[:, None], keys[p], LOWEST),)
        else:
            kept = kept + (keys[p],)
    return kept


@triton.jit
def row_keys(
    logits_ptr, bias_ptr, tokens, here, stride,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """(int32 keys of whole rows, LOWEST for experts that may not be chosen; the softmax's terms)"""
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = here[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride)[:, None] + cols, mask, cols, E)
    largest, total = softmax_terms(logits)
    key = logits
    if BIASED or GROUPS > 1:
        key = scores_of(logits, largest, total, SOFTMAX)
    if BIASED:
        key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
    keys = tl.where(cols < E, order_of(key), LOWEST)
    if GROUPS > 1:
        allowed = in_best_groups(key, cols, E, GROUPS, TOP_GROUPS, BLOCK_R, BLOCK_E)
        keys = tl.where(allowed, keys, LOWEST)
    return keys, largest, total


@triton.jit
def piece_logits(
    first, offset, E: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Pieces (R, BLOCK_P) of the rows of logits that `first` (R,) points to, and their columns."""
    place = tl.arange(0, BLOCK_P)[None, :]
    x = ()
    columns = ()
    for p in tl.static_range(PIECES):
        cols = place + p * BLOCK_P
        columns = columns + (cols,)
        at = first + cols + offset[:, None]
        x = x + (tl.load(at, mask=cols < E, other=float("-inf")).to(tl.float32),)
    return x, columns


@triton.jit
def piece_keys(
    x, columns, bias_ptr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The same of pieces; a group has whole pieces."""
    largest = tl.zeros((BLOCK_R, 1), dtype=tl.float32)
    total = tl.full((BLOCK_R, 1), 1.0, dtype=tl.float32)
    if SOFTMAX and (BIASED or GROUPS > 1 or not NORMALIZE):
        largest, total, _ = exponentials(x, PIECES)
    keys = ()
    for p in tl.static_range(PIECES):
        cols, key = columns[p], x[p]
        if BIASED or GROUPS > 1:
            key = scores_of(key, largest, total, SOFTMAX)
        if BIASED:
            key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
        keys = keys + (tl.where(cols < E, order_of(key), LOWEST),)
    if GROUPS > 1:
        keys = of_best_groups(keys, E // GROUPS, GROUPS, TOP_GROUPS, BLOCK_R, BLOCK_P, PIECES)
    return keys, largest, total


@triton.jit
def swapped(x, experts, ODD: tl.constexpr, N: tl.constexpr):
    """N logits (R,) and their experts, every other two neighbours in descending order."""
    y = ()
    e = ()
    for i in tl.static_range(N):
        if (i + ODD) % 2 == 0 and i + 1 < N:
            turn = x[i + 1] > x[i]
            y = y + (tl.where(turn, x[i + 1], x[i]),)
            e = e + (tl.where(turn, experts[i + 1], experts[i]),)
        elif (i + ODD) % 2 == 1 and i > 0:
            turn = x[i] > x[i - 1]
            y = y + (tl.where(turn, x[i - 1], x[i]),)
            e = e + (tl.where(turn, experts[i - 1], experts[i]),)
        else:
            y = y + (x[i],)
            e = e + (experts[i],)
    return y, e


@triton.jit
def settled(
    first, offset, keys, top, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, LOW: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """(logits and experts of the K largest of N numbered keys, tiles (R, 1) or wider; whether they may be
    wrong), of the sorted K + 1 largest: where two neighbours differ in the lowest bits alone, their
    logits decide. Where three do, it may be wrong.
    """
    x = ()
    experts = ()
    MORE: tl.constexpr = min(K + 1, E)
    for i in tl.static_range(MORE):
        expert = tl.minimum(LOW - (top[i] & LOW), E - 1)
        experts = experts + (expert,)
        x = x + (tl.load(first + offset + expert).to(tl.float32),)
    x, experts = swapped(x, experts, 0, MORE)
    x, experts = swapped(x, experts, 1, MORE)
    wrong = tl.zeros((R,), dtype=tl.int1)
    for i in tl.static_range(K - 1):
        wrong = wrong | ((top[i] | LOW) == (top[i + 2] | LOW))
    last = top[K - 1] | LOW
    edge = last == (top[K] | LOW)
    if tl.max(edge.to(tl.int32), axis=0) > 0:
        alike = tl.zeros((R,), dtype=tl.int32)
        for i in tl.static_range(N):
            alike += tl.sum(((keys[i] | LOW) == last[:, None]).to(tl.int32), axis=1)
        wrong = wrong | (edge & (alike > 2))
    return x[:K], experts[:K], wrong


@triton.jit
def side_by_side(x, N: tl.constexpr, R: tl.constexpr):
    """N tensors (R,) as the columns of one."""
    if N == 1:
        return x[0][:, None]
    else:
        even, odd = side_by_side(x[::2], N // 2, R), side_by_side(x[1::2], N // 2, R)
        return tl.reshape(tl.join(even, odd), (R, N))


@triton.jit
def tile_of(x, N: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr):
    """N tensors (R,) as the columns of a tile (R, BLOCK_N), the first again behind them."""
    y = x
    for _ in tl.static_range(N, BLOCK_N):
        y = y + (x[0],)
    return side_by_side(y, BLOCK_N, R)


@triton.jit
def logits_of(
    logits_ptr, start, T, stride, experts, K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 logits of experts (BLOCK_R, BLOCK_K)."""
    flat = tl.arange(0, BLOCK_R * BLOCK_K)
    token = start + flat // BLOCK_K
    at = logits_ptr + token * stride + tl.reshape(experts, (BLOCK_R * BLOCK_K,))
    chosen = tl.load(at, mask=(token < T) & (flat % BLOCK_K < K), other=0.0).to(tl.float32)
    return tl.reshape(chosen, (BLOCK_R, BLOCK_K))


@triton.jit
def store_chosen(
    weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, largest, total, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BEST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of experts and their logits (BLOCK_R, BLOCK_K). BEST: they have the largest logits, and a softmax
    over them needs no others.
    """
    slots = tl.arange(0, BLOCK_K)[None, :]
    if SOFTMAX and NORMALIZE and BEST:
        weights = tl.where(slots < K, chosen, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    else:
        weights = tl.where(slots < K, scores_of(chosen, largest, total, SOFTMAX), 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, axis=1)[:, None] + TINY)
    flat = tl.arange(0, BLOCK_R * BLOCK_K)
    token = start + flat // BLOCK_K
    at, mask = token * K + flat % BLOCK_K, (token < T) & (flat % BLOCK_K < K)
    tl.store(weights_ptr + at, tl.reshape(weights, (BLOCK_R * BLOCK_K,)) * scale, mask=mask)
    tl.store(experts_ptr + at, tl.reshape(experts, (BLOCK_R * BLOCK_K,)), mask=mask)
    tl.store(chosen_ptr + at, tl.reshape(chosen, (BLOCK_R * BLOCK_K,)), mask=mask)


@triton.jit
def choose_one_by_one(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start, T, stride, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The slow way, for BLOCK_R tokens together."""
    cols, rows = tl.arange(0, BLOCK_E)[None, :], start + tl.arange(0, BLOCK_R)
    keys, largest, total = row_keys(
        logits_ptr, bias_ptr, rows, rows < T, stride, SOFTMAX, BIASED, GROUPS, TOP_GROUPS, E,
        BLOCK_R, BLOCK_E,
    )  # fmt: skip
    experts = top_one_by_one(keys, cols, E, K, BLOCK_K, BLOCK_R, BLOCK_E)
    chosen = logits_of(logits_ptr, start, T, stride, experts, K, BLOCK_R, BLOCK_K)
    store_chosen(
        weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, largest, total, scale,
        K, SOFTMAX, NORMALIZE, GROUPS == 1 and not BIASED, BLOCK_R, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def router_fwd_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, T, quads, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = BLOCK_E - 1
    BEST: tl.constexpr = GROUPS == 1 and not BIASED
    EXACT: tl.constexpr = BEST and logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    stride = quads * WIDE  # so that Triton sees what it is a multiple of
    if BLOCK_P == 0:
        choose_one_by_one(
            logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start, T, stride, scale,
            K, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E, BLOCK_R, BLOCK_K, BLOCK_E,
        )  # fmt: skip
    else:
        PIECES: tl.constexpr = BLOCK_E // BLOCK_P
        W: tl.constexpr = BLOCK_P // 4
        place = tl.arange(0, BLOCK_R)
        last = tl.minimum(T - 1 - start, BLOCK_R - 1).to(tl.int32)  # beyond, this one again
        first, offset = logits_ptr + start * stride, tl.minimum(place, last).to(tl.int64) * stride
        pieces, columns = piece_logits(first, offset, E, BLOCK_P, PIECES)
        keys, largest, total = piece_keys(
            pieces, columns, bias_ptr, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E,
            BLOCK_R, BLOCK_P, PIECES,
        )  # fmt: skip
        QUADS: tl.constexpr = BEST and 8 * BLOCK_K <= BLOCK_E
        V: tl.constexpr = 1 if QUADS and W > BLOCK_K else W
        if QUADS:
            keys, firsts, other, missing = best_quads(
                first, offset, pieces, K, PIECES, E, BLOCK_R, W, BLOCK_K, V
            )
            N: tl.constexpr = 4 * BLOCK_K // V
        else:
            firsts = ()
            for p in tl.static_range(PIECES):
                firsts = firsts + (BLOCK_P * p + 4 * tl.arange(0, W)[None, :],)
            N: tl.constexpr = 4 * PIECES
        keys = numbered_pieces(keys, firsts, LOW, N // 4, BLOCK_R, V)
        top, left = largest_of_pieces(keys, N, BLOCK_R, V, BLOCK_K)
        top = top + (left,)
        if BEST and not EXACT:
            x, experts, unsure = settled(first, offset, keys, top, N, K, E, LOW, BLOCK_R)
            chosen = tile_of(x, K, BLOCK_R, BLOCK_K)
            experts = tile_of(experts, K, BLOCK_R, BLOCK_K)
        else:
            experts = LOW - (tile_of(top[:K], K, BLOCK_R, BLOCK_K) & LOW)
            chosen = logits_of(logits_ptr, start, T, stride, experts, K, BLOCK_R, BLOCK_K)
            unsure = tl.zeros((BLOCK_R,), dtype=tl.int1)
            for i in tl.static_range(K):
                unsure = unsure | ((top[i] | LOW) == (top[i + 1] | LOW))
        if QUADS:
            unsure = unsure | (missing & ((other | LOW) >= (top[K - 1] | LOW)))
        store_chosen(
            weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, largest, total, scale,
            K, SOFTMAX, NORMALIZE, BEST, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        if not EXACT:
            again = tl.where(unsure & (place <= last), place, BLOCK_R)
            r = tl.min(again, axis=0)
            while r < BLOCK_R:
                tl.debug_barrier()  # these stores come after those above
                choose_one_by_one(
                    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start + r, T, stride,
                    scale, K, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E, 1, BLOCK_K, BLOCK_E,
                )  # fmt: skip
                again = tl.where(place == r, BLOCK_R, again)
                r = tl.min(again, axis=0)


@triton.jit(do_not_specialize=["T"])
def router_bwd_kernel(
    dweights_ptr, logits_ptr, experts_ptr, dlogits_ptr, T, stride_logits, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ALL: tl.constexpr,
    E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """From all logits (T, E) if ALL; otherwise from those of the chosen (T, K), whose softmax is one
    over those. Rows are written as if nothing were chosen, and the K of the chosen over that.
    """
    WHOLE: tl.constexpr = SOFTMAX and ALL
    PIECES: tl.constexpr = BLOCK_E // BLOCK_P
    N: tl.constexpr = BLOCK_R * BLOCK_K
    dtype = dlogits_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    tokens = start + tl.arange(0, BLOCK_R)
    here, place = (tokens < T)[:, None], tl.arange(0, BLOCK_P)[None, :]
    row = dlogits_ptr + (tokens * E)[:, None]
    rest = ()
    if WHOLE:
        for p in tl.static_range(PIECES):
            cols = place + p * BLOCK_P
            at = logits_ptr + (tokens * stride_logits)[:, None] + cols
            rest = rest + (load_logits(at, here & (cols < E), cols, E),)
    flat = tl.arange(0, N)  # of the chosen: a lane has one slot of a token, in every tile below
    token, slot = start + flat // BLOCK_K, flat % BLOCK_K
    mask, at = (token < T) & (slot < K), token * K + slot
    expert = tl.load(experts_ptr + at, mask=mask, other=0)
    d = tl.load(dweights_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    if WHOLE:
        tl.debug_barrier()  # keeps the loads of rows before the wait for the experts
    if ALL:
        at = token * stride_logits + expert
    chosen = tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if not WHOLE:  # while the loads are on their way
        cols = tl.arange(0, BLOCK_E)[None, :]
        tl.store(row + cols, tl.zeros((BLOCK_R, BLOCK_E), dtype), mask=here & (cols < E))
        tl.debug_barrier()
    d, chosen = tl.reshape(d, (BLOCK_R, BLOCK_K)), tl.reshape(chosen, (BLOCK_R, BLOCK_K))
    slots = tl.arange(0, BLOCK_K)[None, :]
    if WHOLE:
        largest, total, rest = exponentials(rest, PIECES)
        s = tl.where(slots < K, tl.exp(chosen - largest) / total, 0.0)
    elif SOFTMAX:
        chosen = tl.where(slots < K, chosen, float("-inf"))
        s = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
    else:
        s = tl.where(slots < K, tl.sigmoid(chosen), 0.0)
    if NORMALIZE:
        sums = tl.sum(s, axis=1)[:, None] + (0.0 if SOFTMAX and not ALL else TINY)
        d = (d - tl.sum(d * s, axis=1)[:, None] / sums) / sums
    if WHOLE:
        dot = tl.sum(d * s, axis=1)[:, None]
        d = (d - dot) * s
        each = -dot / total
        for p in tl.static_range(PIECES):
            cols = place + p * BLOCK_P
            tl.store(row + cols, (each * rest[p]).to(dtype), mask=here & (cols < E))
        tl.debug_barrier()
    elif SOFTMAX:
        d = d * s
    else:
        d = d * s * (1.0 - s)
    # after a barrier: over what is there
    tl.store(dlogits_ptr + token * E + expert, tl.reshape(d, (N,)).to(dtype), mask=mask)
