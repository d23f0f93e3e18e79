"""The router's forward: top-k of the experts of each token, their weights and logits. Triton, sm_80 and later.

A program owns BLOCK_R tokens; BLOCK_E, a power of two, holds all experts of one. Scores are made int32 keys in the
order of floats (`float_to_sortable`), and the K largest are found in one of two ways:

- Fast: a row is cut into pieces of BLOCK_P columns and spread over BLOCK_P / 4 threads of a warp, so that each holds
  four neighbours, a quad, of every piece. A selection network (`select.py`) runs over what a thread holds, minima and
  maxima of int32 in registers, and then across the row's few threads by shuffles. Of many experts (8 K <= E, by logits
  alone) the network first selects K quads by their largest logit, and then K logits of these quads; where more than K
  threads had a row, one has it in the second step.
- Slow: K argmax reductions over whole rows. BLOCK_P = 0 takes it for all tokens.

The index of an expert takes the lowest log2(BLOCK_E) bits of its key, so the network compares all but these bits.
16-bit logits have zeros there and are exact. Of other keys, ties in the upper bits are found out: logits settle the
order of two, and tokens with more are ambiguous; a loop at the end of the program routes them again the slow way, over
what was stored.

Traps: rows beyond T read the last row again instead of being masked, so loads of whole pieces need no row mask. The
barrier in the loop at the end orders its stores behind the first ones to the same addresses.
"""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, no-redef, var-annotated"

import triton
import triton.language as tl

from fuseops.kernels.device.select import (
    KEY_MIN,
    deinterleave_by_4,
    pack_expert_ids,
    pack_index,
    resolve_ties_by_logits,
    select_top,
    select_top_across_lanes,
    select_top_of_rows,
    stack_tile,
    topk_by_repeated_max,
    unstack_rows,
)

TINY: tl.constexpr = tl.constexpr(1e-20)


@triton.jit
def load_logits(ptrs, mask, cols, E):
    """Load float32 logits: -inf beyond the experts, 0 beyond the tokens (where -inf would give NaN)."""
    return tl.where(cols < E, tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), float("-inf"))


@triton.jit
def softmax_stats(logits):
    """Reduce each row of a float32 tile (B, N) to what a softmax needs.   -> (row maximum, row sum of exp(x -
    maximum)), both (B, 1)
    """
    row_max = tl.max(logits, axis=1)[:, None]
    return row_max, tl.sum(tl.exp(logits - row_max), axis=1)[:, None]


@triton.jit
def softmax_exps(pieces, PIECES: tl.constexpr):
    """Compute a softmax's terms of rows in pieces (R, BLOCK_P).   -> (row maximum (R, 1), row sum (R, 1), exp(x -
    maximum) as pieces)
    """
    row_max = pieces[0]
    for p in tl.static_range(1, PIECES):
        row_max = tl.maximum(row_max, pieces[p])
    row_max = tl.max(row_max, axis=1)[:, None]
    exps = (tl.exp(pieces[0] - row_max),)
    row_sum = exps[0]
    for p in tl.static_range(1, PIECES):
        exps = exps + (tl.exp(pieces[p] - row_max),)
        row_sum += exps[p]
    return row_max, tl.sum(row_sum, axis=1)[:, None], exps


@triton.jit
def scores_of(logits, row_max, row_sum, SOFTMAX: tl.constexpr):
    """Compute the scores of float32 logits; `row_max` and `row_sum` are of all logits of the token
    (`softmax_stats`).
    """
    if SOFTMAX:
        return tl.exp(logits - row_max) / row_sum
    else:
        return tl.sigmoid(logits)


@triton.jit
def float_to_sortable(key):
    """Map float32 keys to int32 of the same order, above KEY_MIN; NaN ranks as inf, and -0 as 0."""
    bits = tl.minimum(key + 0.0, float("inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def nan_maximum(a, b):
    """The larger of two floats; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sortable_to_float(key):
    """Map int32 keys back to float32: the inverse of `float_to_sortable`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def select_best_quads(
    tile_ptr, row_offset, pieces, K: tl.constexpr, PIECES: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, OUT_LANES: tl.constexpr,
):  # fmt: skip
    """Select the TOP quads of experts (four in a row) with the largest maxima, which hold the TOP largest logits, and
    load these quads again: fewer keys for the network than all E.

    The rows (BLOCK_R,) of logits begin at `tile_ptr` + `row_offset`, and are given as PIECES pieces (BLOCK_R, 4 LANES).
    Keys of quads have the quad's number in the lowest bits.
    -> (keys (BLOCK_R, 4 OUT_LANES), in TOP / OUT_LANES pieces; the first expert of each quad, as pieces; the key of the
    largest rejected quad; whether it ties with the K-th one but for the bits of the number)
    """
    QUAD_MASK: tl.constexpr = PIECES * LANES - 1
    lane = tl.arange(0, LANES)[None, :]
    quad_keys = ()
    for p in tl.static_range(PIECES):
        a, b, c, d = deinterleave_by_4(pieces[p], BLOCK_R, LANES)
        top = nan_maximum(nan_maximum(a, b), nan_maximum(c, d))
        top = pack_index(float_to_sortable(top), LANES * p + lane, QUAD_MASK)
        quad_keys = quad_keys + (
            unstack_rows(tl.trans(top), LANES, BLOCK_R) if OUT_LANES < LANES else (top,)
        )
    if OUT_LANES < LANES:
        top, max_rejected = select_top(quad_keys, PIECES * LANES, TOP)
    else:
        top, max_rejected = select_top_of_rows(quad_keys, PIECES, BLOCK_R, LANES, TOP)
    differing_bits = (top[K - 1] ^ max_rejected).to(tl.uint32, bitcast=True)
    lane = tl.arange(0, OUT_LANES)[None, :]
    in_quad = tl.arange(0, 4)[None, None, :]
    keys = ()
    first_experts = ()
    for q in tl.static_range(TOP // OUT_LANES):
        first_expert = tl.zeros((BLOCK_R, OUT_LANES), dtype=tl.int32)
        for w in tl.static_range(OUT_LANES):
            first_expert = tl.where(
                lane == w,
                4 * (QUAD_MASK - (top[q * OUT_LANES + w] & QUAD_MASK))[:, None],
                first_expert,
            )
        cols = first_expert[:, :, None] + in_quad
        ptrs = tile_ptr + row_offset[:, None, None] + cols
        if E % 4 == 0:  # there are at least TOP whole quads: no padded one is chosen
            keys = keys + (float_to_sortable(tl.load(ptrs).to(tl.float32)),)
        else:
            logits = tl.load(ptrs, mask=cols < E, other=0.0).to(tl.float32)
            keys = keys + (tl.where(cols < E, float_to_sortable(logits), KEY_MIN),)
        first_experts = first_experts + (first_expert,)
    return keys, first_experts, max_rejected, differing_bits <= QUAD_MASK


@triton.jit
def mask_of_top_groups(
    key, cols, E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Mask the experts of the TOP_GROUPS groups whose two best keys have the largest sums; of equal sums the lower
    group wins.
    -> (BLOCK_R, BLOCK_E) of int1
    """
    # one slot a group: there are no more groups than experts
    group_slots = tl.arange(0, BLOCK_E)[None, :]
    group = cols // (E // GROUPS)
    group_scores = tl.full((BLOCK_R, BLOCK_E), KEY_MIN, dtype=tl.int32)
    for g in tl.static_range(GROUPS):
        in_group = tl.where((group == g) & (cols < E), key, float("-inf"))
        best = tl.max(in_group, axis=1)[:, None]
        argmax = tl.min(tl.where((in_group == best) & (group == g), cols, BLOCK_E), axis=1)[:, None]
        second = tl.max(tl.where(cols == argmax, float("-inf"), in_group), axis=1)[:, None]
        group_scores = tl.where(
            group_slots == g,
            float_to_sortable(tl.where(E > GROUPS, best + second, best)),
            group_scores,
        )
    mask = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(group_scores, axis=1)[:, None]
        best = tl.min(tl.where(group_scores == top, group_slots, BLOCK_E), axis=1)[:, None]
        mask = mask | (group == best)
        group_scores = tl.where(group_slots == best, KEY_MIN, group_scores)
    return mask


@triton.jit
def mask_pieces_to_top_groups(
    keys, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Replace by KEY_MIN the keys of experts outside the TOP_GROUPS best groups, as `mask_of_top_groups`, in pieces
    (BLOCK_R, BLOCK_P) of int32 keys. A group of GROUP_SIZE experts is GROUP_PIECES whole pieces, and its rank is a
    count of the groups that beat it.
    """
    LANES: tl.constexpr = BLOCK_P // 4
    GROUP_PIECES: tl.constexpr = GROUP_SIZE // BLOCK_P
    group_scores = ()
    for g in tl.static_range(GROUPS):
        group_keys = ()
        for p in tl.static_range(GROUP_PIECES):
            group_keys = group_keys + deinterleave_by_4(keys[g * GROUP_PIECES + p], BLOCK_R, LANES)
        group_keys, max_rejected = select_top(group_keys, 4 * GROUP_PIECES, 2)
        best, _ = select_top_across_lanes(group_keys, max_rejected, 2, BLOCK_R, LANES)
        group_scores = group_scores + (
            float_to_sortable(sortable_to_float(best[0]) + sortable_to_float(best[1])),
        )
    masked = ()
    for p in tl.static_range(PIECES):
        if p < GROUPS * GROUP_PIECES:
            group_score = group_scores[p // GROUP_PIECES]
            rank = tl.zeros((BLOCK_R,), dtype=tl.int32)
            for g in tl.static_range(GROUPS):
                if g * GROUP_PIECES > p:
                    rank += (group_scores[g] > group_score).to(tl.int32)
                elif (g + 1) * GROUP_PIECES <= p:
                    rank += (group_scores[g] >= group_score).to(tl.int32)
            masked = masked + (tl.where((rank < TOP_GROUPS)[:, None], keys[p], KEY_MIN),)
        else:
            masked = masked + (keys[p],)
    return masked


@triton.jit
def load_row_keys(
    logits_ptr, bias_ptr, tokens, row_mask, stride,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Load whole rows of logits (BLOCK_R, BLOCK_E) and compute their keys.   -> (int32 keys, KEY_MIN for experts that
    may not be chosen; row maximum, row sum)
    """
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = row_mask[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride)[:, None] + cols, mask, cols, E)
    row_max, row_sum = softmax_stats(logits)
    key = logits
    if BIASED or GROUPS > 1:
        key = scores_of(logits, row_max, row_sum, SOFTMAX)
    if BIASED:
        key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
    keys = tl.where(cols < E, float_to_sortable(key), KEY_MIN)
    if GROUPS > 1:
        allowed = mask_of_top_groups(key, cols, E, GROUPS, TOP_GROUPS, BLOCK_R, BLOCK_E)
        keys = tl.where(allowed, keys, KEY_MIN)
    return keys, row_max, row_sum


@triton.jit
def load_pieces(
    tile_ptr, row_offset, E: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Load rows of logits, which begin at `tile_ptr` + `row_offset` (R,), as PIECES pieces (R, BLOCK_P): 16 bytes of
    float32 a thread and piece.   -> (float32 pieces, -inf beyond E; the columns of each)
    """
    piece_cols = tl.arange(0, BLOCK_P)[None, :]
    pieces = ()
    columns = ()
    for p in tl.static_range(PIECES):
        cols = piece_cols + p * BLOCK_P
        columns = columns + (cols,)
        ptrs = tile_ptr + cols + row_offset[:, None]
        pieces = pieces + (tl.load(ptrs, mask=cols < E, other=float("-inf")).to(tl.float32),)
    return pieces, columns


@triton.jit
def keys_of_pieces(
    pieces, columns, bias_ptr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Compute the int32 keys of pieces of logits (BLOCK_R, BLOCK_P), as `load_row_keys` does of whole rows; a group of
    experts is whole pieces.   -> (keys, as pieces; row maximum and row sum, 0 and 1 where no score needs them)
    """
    row_max = tl.zeros((BLOCK_R, 1), dtype=tl.float32)
    row_sum = tl.full((BLOCK_R, 1), 1.0, dtype=tl.float32)
    if SOFTMAX and (BIASED or GROUPS > 1 or not NORMALIZE):
        row_max, row_sum, _ = softmax_exps(pieces, PIECES)
    keys = ()
    for p in tl.static_range(PIECES):
        cols, key = columns[p], pieces[p]
        if BIASED or GROUPS > 1:
            key = scores_of(key, row_max, row_sum, SOFTMAX)
        if BIASED:
            key += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
        keys = keys + (tl.where(cols < E, float_to_sortable(key), KEY_MIN),)
    if GROUPS > 1:
        keys = mask_pieces_to_top_groups(
            keys, E // GROUPS, GROUPS, TOP_GROUPS, BLOCK_R, BLOCK_P, PIECES
        )
    return keys, row_max, row_sum


@triton.jit
def gather_logits(
    logits_ptr, start, T, stride, experts, K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the logits of experts (BLOCK_R, BLOCK_K) in float32, 0 beyond K and beyond the tokens."""
    flat = tl.arange(0, BLOCK_R * BLOCK_K)
    token = start + flat // BLOCK_K
    ptrs = logits_ptr + token * stride + tl.reshape(experts, (BLOCK_R * BLOCK_K,))
    chosen = tl.load(ptrs, mask=(token < T) & (flat % BLOCK_K < K), other=0.0).to(tl.float32)
    return tl.reshape(chosen, (BLOCK_R, BLOCK_K))


@triton.jit
def store_topk(
    weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, row_max, row_sum, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP_LOGITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the weights of the chosen experts from their logits (BLOCK_R, BLOCK_K), and store weights, experts and
    logits.

    TOP_LOGITS: the chosen have the largest logits of all, so that a normalized softmax needs no others.
    """
    slots = tl.arange(0, BLOCK_K)[None, :]
    if SOFTMAX and NORMALIZE and TOP_LOGITS:
        weights = tl.where(slots < K, chosen, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    else:
        weights = tl.where(slots < K, scores_of(chosen, row_max, row_sum, SOFTMAX), 0.0)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, axis=1)[:, None] + TINY)
    flat = tl.arange(0, BLOCK_R * BLOCK_K)
    token = start + flat // BLOCK_K
    offsets, mask = token * K + flat % BLOCK_K, (token < T) & (flat % BLOCK_K < K)
    tl.store(weights_ptr + offsets, tl.reshape(weights, (BLOCK_R * BLOCK_K,)) * scale, mask=mask)
    tl.store(experts_ptr + offsets, tl.reshape(experts, (BLOCK_R * BLOCK_K,)), mask=mask)
    tl.store(chosen_ptr + offsets, tl.reshape(chosen, (BLOCK_R * BLOCK_K,)), mask=mask)


@triton.jit
def route_by_repeated_max(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start, T, stride, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Route BLOCK_R tokens from `start` on by the slow, exact way: K argmax reductions over whole rows."""
    cols, rows = tl.arange(0, BLOCK_E)[None, :], start + tl.arange(0, BLOCK_R)
    keys, row_max, row_sum = load_row_keys(
        logits_ptr, bias_ptr, rows, rows < T, stride, SOFTMAX, BIASED, GROUPS, TOP_GROUPS, E,
        BLOCK_R, BLOCK_E,
    )  # fmt: skip
    experts = topk_by_repeated_max(keys, cols, E, K, BLOCK_K, BLOCK_R, BLOCK_E)
    chosen = gather_logits(logits_ptr, start, T, stride, experts, K, BLOCK_R, BLOCK_K)
    store_topk(
        weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, row_max, row_sum, scale,
        K, SOFTMAX, NORMALIZE, GROUPS == 1 and not BIASED, BLOCK_R, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def router_fwd_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, T, quads, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Route BLOCK_R tokens a program.

    logits (T, E) with rows quads * WIDE elements apart, bias (E,) -> weights, experts and logits of the chosen (T, K),
    in descending order of keys. BLOCK_P: columns of a piece, 0 for the slow way alone.
    """
    EXPERT_MASK: tl.constexpr = BLOCK_E - 1
    TOP_LOGITS: tl.constexpr = GROUPS == 1 and not BIASED
    EXACT: tl.constexpr = TOP_LOGITS and logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    stride = quads * WIDE  # a product, so that Triton sees its divisor
    if BLOCK_P == 0:
        route_by_repeated_max(
            logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start, T, stride, scale,
            K, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E, BLOCK_R, BLOCK_K, BLOCK_E,
        )  # fmt: skip
    else:
        PIECES: tl.constexpr = BLOCK_E // BLOCK_P
        LANES: tl.constexpr = BLOCK_P // 4
        row = tl.arange(0, BLOCK_R)
        # rows beyond the last one read it again
        last = tl.minimum(T - 1 - start, BLOCK_R - 1).to(tl.int32)
        tile_ptr, offset = logits_ptr + start * stride, tl.minimum(row, last).to(tl.int64) * stride
        pieces, columns = load_pieces(tile_ptr, offset, E, BLOCK_P, PIECES)
        keys, row_max, row_sum = keys_of_pieces(
            pieces, columns, bias_ptr, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E,
            BLOCK_R, BLOCK_P, PIECES,
        )  # fmt: skip
        QUADS: tl.constexpr = TOP_LOGITS and 8 * BLOCK_K <= BLOCK_E
        OUT_LANES: tl.constexpr = 1 if QUADS and LANES > BLOCK_K else LANES
        if QUADS:
            keys, first_experts, rejected_quad, quad_tied = select_best_quads(
                tile_ptr, offset, pieces, K, PIECES, E, BLOCK_R, LANES, BLOCK_K, OUT_LANES
            )
            NUM_KEYS: tl.constexpr = 4 * BLOCK_K // OUT_LANES
        else:
            first_experts = ()
            for p in tl.static_range(PIECES):
                first_experts = first_experts + (BLOCK_P * p + 4 * tl.arange(0, LANES)[None, :],)
            NUM_KEYS: tl.constexpr = 4 * PIECES
        keys = pack_expert_ids(keys, first_experts, EXPERT_MASK, NUM_KEYS // 4, BLOCK_R, OUT_LANES)
        top, max_rejected = select_top_of_rows(keys, NUM_KEYS, BLOCK_R, OUT_LANES, BLOCK_K)
        top = top + (max_rejected,)
        if TOP_LOGITS and not EXACT:
            logits, experts, ambiguous = resolve_ties_by_logits(
                tile_ptr, offset, keys, top, NUM_KEYS, K, E, EXPERT_MASK, BLOCK_R
            )
            chosen = stack_tile(logits, K, BLOCK_R, BLOCK_K)
            experts = stack_tile(experts, K, BLOCK_R, BLOCK_K)
        else:
            experts = EXPERT_MASK - (stack_tile(top[:K], K, BLOCK_R, BLOCK_K) & EXPERT_MASK)
            chosen = gather_logits(logits_ptr, start, T, stride, experts, K, BLOCK_R, BLOCK_K)
            ambiguous = tl.zeros((BLOCK_R,), dtype=tl.int1)
            for i in tl.static_range(K):
                ambiguous = ambiguous | ((top[i] | EXPERT_MASK) == (top[i + 1] | EXPERT_MASK))
        if QUADS:
            ambiguous = ambiguous | (
                quad_tied & ((rejected_quad | EXPERT_MASK) >= (top[K - 1] | EXPERT_MASK))
            )
        store_topk(
            weights_ptr, experts_ptr, chosen_ptr, start, T, experts, chosen, row_max, row_sum,
            scale, K, SOFTMAX, NORMALIZE, TOP_LOGITS, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        if not EXACT:
            retry_rows = tl.where(ambiguous & (row <= last), row, BLOCK_R)
            retry_row = tl.min(retry_rows, axis=0)
            while retry_row < BLOCK_R:
                tl.debug_barrier()  # the stores below come after those above
                route_by_repeated_max(
                    logits_ptr, bias_ptr, weights_ptr, experts_ptr, chosen_ptr, start + retry_row,
                    T, stride, scale, K, SOFTMAX, NORMALIZE, BIASED, GROUPS, TOP_GROUPS, E, 1,
                    BLOCK_K, BLOCK_E,
                )  # fmt: skip
                retry_rows = tl.where(row == retry_row, BLOCK_R, retry_rows)
                retry_row = tl.min(retry_rows, axis=0)
