"""Kernels of fuseops.kernels.router. BLOCK_E holds all experts of a token."""

import triton
import triton.language as tl

TINY: tl.constexpr = tl.constexpr(1e-20)
LOWEST: tl.constexpr = tl.constexpr(-2147483648)


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
def scores_of(logits, largest, total, SOFTMAX: tl.constexpr):
    """Scores of float32 logits; ``softmax_terms`` are of all logits of the token."""
    if SOFTMAX:
        return tl.exp(logits - largest) / total
    else:
        return tl.sigmoid(logits)


@triton.jit
def order_of(key):
    """int32 in the order of float32 keys, above LOWEST; NaN is the largest, as inf, and -0 is 0."""
    key = tl.where(key == key, tl.where(key == 0.0, 0.0, key), float("inf"))
    bits = key.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def larger_first(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def sorted4(keys, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Four slices (BLOCK_R, BLOCK_E // 4) of the keys, in descending order at every place."""
    ac, bd = tl.split(tl.reshape(keys, (BLOCK_R, BLOCK_E // 4, 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    a, b = larger_first(a, b)
    c, d = larger_first(c, d)
    a, c = larger_first(a, c)
    b, d = larger_first(b, d)
    b, c = larger_first(b, c)
    return a, b, c, d


@triton.jit
def top_by_pieces(
    keys, cols, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """(the K experts with the largest keys, the lower expert first among equals; whether that may be
    wrong). Experts take the place of the lowest bits of their keys, which makes all keys different:
    it may be wrong if two of the largest differ in those bits alone.
    """
    LOW: tl.constexpr = BLOCK_E - 1
    unique = tl.where(cols < E, (keys & ~LOW) | (LOW - cols), LOWEST)
    a, b, c, d = sorted4(unique, BLOCK_R, BLOCK_E)
    experts = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.int32)
    slots = tl.arange(0, BLOCK_K)[None, :]
    alike = tl.zeros((BLOCK_R, 1), dtype=tl.int32)
    before = tl.full((BLOCK_R, 1), LOWEST, dtype=tl.int32)
    for k in tl.static_range(K + 1):
        top = tl.max(a, axis=1)[:, None]
        if k < K:
            experts = tl.where(slots == k, LOW - (top & LOW), experts)
            taken = a == top
            a, b, c = tl.where(taken, b, a), tl.where(taken, c, b), tl.where(taken, d, c)
            d = tl.where(taken, LOWEST, d)
        alike = tl.where((top & ~LOW) == (before & ~LOW), 1, alike)
        before = top
    bits = tl.max(tl.where(cols < E, keys & LOW, 0), axis=1)[:, None]
    return experts, tl.max(tl.where(bits != 0, alike, 0))


@triton.jit
def top_one_by_one(
    keys, cols, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """K times the largest key that is left, the lower expert first among equals."""
    left = tl.where(cols < E, keys, LOWEST)
    experts = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.int32)
    slots = tl.arange(0, BLOCK_K)[None, :]
    for k in tl.static_range(K):
        top = tl.max(left, axis=1)[:, None]
        best = tl.min(tl.where(left == top, cols, BLOCK_E), axis=1)[:, None]
        experts = tl.where(slots == k, best, experts)
        left = tl.where(cols == best, LOWEST, left)
    return experts


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


@triton.jit(do_not_specialize=["T"])
def router_fwd_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, T, E, stride_logits, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The scores of the chosen are computed again, from their logits: a sum over the row for each
    would cost more.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = (tokens < T)[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
    largest, total = softmax_terms(logits)
    key = logits
    if BIASED or GROUPS > 1:
        key = scores_of(logits, largest, total, SOFTMAX)
    if BIASED:
        key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
    keys = order_of(key)
    if GROUPS > 1:
        allowed = in_best_groups(key, cols, E, GROUPS, TOP_GROUPS, BLOCK_R, BLOCK_E)
        keys = tl.where(allowed, keys, LOWEST)
    experts, unsure = top_by_pieces(keys, cols, E, K, BLOCK_K, BLOCK_R, BLOCK_E)
    if unsure > 0:
        experts = top_one_by_one(keys, cols, E, K, BLOCK_K, BLOCK_R, BLOCK_E)
    flat = tl.arange(0, BLOCK_R * BLOCK_K)  # one chosen expert a thread
    token, slot = flat // BLOCK_K, flat % BLOCK_K
    expert = tl.gather(tl.reshape(experts, (BLOCK_R * BLOCK_K,)), flat, axis=0)
    token64 = tl.program_id(0).to(tl.int64) * BLOCK_R + token
    mask = (token64 < T) & (slot < K)
    chosen = tl.load(logits_ptr + token64 * stride_logits + expert, mask=mask, other=0.0)
    chosen = chosen.to(tl.float32)
    top = tl.gather(tl.reshape(largest, (BLOCK_R,)), token, axis=0)
    below = tl.gather(tl.reshape(total, (BLOCK_R,)), token, axis=0)
    weights = scores_of(chosen, top, below, SOFTMAX)
    weights = tl.where(slot < K, weights, 0.0)
    if NORMALIZE:
        sums = tl.sum(tl.reshape(weights, (BLOCK_R, BLOCK_K)), axis=1)
        weights = weights / (tl.gather(sums, token, axis=0) + TINY)
    at = token64 * K + slot
    tl.store(weights_ptr + at, weights * scale, mask=mask)
    tl.store(experts_ptr + at, expert, mask=mask)
    tl.store(chosen_ptr + at, chosen, mask=mask)


@triton.jit(do_not_specialize=["T"])
def router_bwd_kernel(
    dweights_ptr, logits_ptr, experts_ptr, dlogits_ptr, T, E, stride_logits, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = tokens < T
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = here[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
    largest, total = softmax_terms(logits)
    scores = scores_of(logits, largest, total, SOFTMAX)
    d = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    picked = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.int1)
    for k in tl.static_range(K):
        expert = tl.load(experts_ptr + tokens * K + k, mask=here, other=-1)[:, None]
        dw = tl.load(dweights_ptr + tokens * K + k, mask=here, other=0.0).to(tl.float32)
        d = tl.where(cols == expert, dw[:, None] * scale, d)
        picked = picked | (cols == expert)
    if NORMALIZE:
        chosen = tl.where(picked, scores, 0.0)
        total = tl.sum(chosen, axis=1)[:, None] + TINY
        d = tl.where(picked, (d - tl.sum(d * chosen, axis=1)[:, None] / total) / total, 0.0)
    if SOFTMAX:
        d = scores * (d - tl.sum(d * scores, axis=1)[:, None])
    else:
        d = d * scores * (1.0 - scores)
    tl.store(
        dlogits_ptr + (tokens * E)[:, None] + cols, d.to(dlogits_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def chosen_terms(dweights_ptr, logits_ptr, at, here, largest, scale, SOFTMAX: tl.constexpr):
    """(gradient of the score, the score or its exponential) of one of the chosen of each token."""
    logits = tl.load(logits_ptr + at, mask=here, other=0.0).to(tl.float32)
    dw = tl.load(dweights_ptr + at, mask=here, other=0.0).to(tl.float32)
    return dw * scale, tl.exp(logits - largest) if SOFTMAX else tl.sigmoid(logits)


@triton.jit(do_not_specialize=["T"])
def router_bwd_chosen_kernel(
    dweights_ptr, logits_ptr, experts_ptr, dlogits_ptr, T, E, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The same from the logits of the chosen alone (T, K): a softmax is one over those."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = tokens < T
    cols = tl.arange(0, BLOCK_E)[None, :]
    largest = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    for k in tl.static_range(K if SOFTMAX else 0):
        logits = tl.load(logits_ptr + tokens * K + k, mask=here, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, logits)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    dot = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for k in tl.static_range(K):
        at = tokens * K + k
        g, s = chosen_terms(dweights_ptr, logits_ptr, at, here, largest, scale, SOFTMAX)
        total += s
        dot += g * s
    total += 0.0 if SOFTMAX else TINY
    d = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for k in tl.static_range(K):
        at = tokens * K + k
        g, s = chosen_terms(dweights_ptr, logits_ptr, at, here, largest, scale, SOFTMAX)
        if NORMALIZE:
            g = (g - dot / total) / total
        g = g * s if SOFTMAX else g * s * (1.0 - s)
        expert = tl.load(experts_ptr + at, mask=here, other=-1)
        d = tl.where(cols == expert[:, None], g[:, None], d)
    tl.store(
        dlogits_ptr + (tokens * E)[:, None] + cols, d.to(dlogits_ptr.dtype.element_ty),
        mask=here[:, None] & (cols < E),
    )  # fmt: skip
