"""Cross-entropy over logits that a GEMM gave: loss, statistics and gradient, in place. Triton, sm_80 and later.

A program owns one row, the logits of one token, and walks over it in blocks. The forward is an online softmax: each
lane keeps a running maximum and sums of its own over LANE_LOGITS logits a block, so nothing is exchanged within the
loop, and the lanes are merged once at the end. Exponentials are powers of two; logits are scaled by log2(e).

Trap: products that lanes exchange go through `mul_rn`, or lanes of a row would end with different sums.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import mul_rn

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LANE_LOGITS = tl.constexpr(8)  # neighbouring logits of a lane, which share one running maximum


@triton.jit
def _apply_soft_cap(raw, soft_cap, CAPPED: tl.constexpr):
    """Cap the GEMM's logits, in float32. The loss is taken of these over the temperature."""
    logits = raw.to(tl.float32)
    if CAPPED:
        logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)  # tanh
    return logits


@triton.jit
def _online_softmax_step(
    logits_ptr, class_weights_ptr, cols, width, soft_cap, scale, lane_max, lane_sum, lane_moment,
    lane_smooth, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    MOMENT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update a lane's running maximum, in powers of two, and its sums by a block of (lanes, LANE_LOGITS) logits: one
    step of an online softmax, whose sums are rescaled to the new maximum.
    """
    if MASKED:
        raw = tl.load(logits_ptr + cols, mask=cols < width, other=-float("inf"))
        logits = tl.where(cols < width, _apply_soft_cap(raw, soft_cap, CAPPED), -float("inf"))
    else:
        logits = _apply_soft_cap(tl.load(logits_ptr + cols), soft_cap, CAPPED)
    new_max = tl.maximum(lane_max, tl.max(logits, axis=1) * scale)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(logits * scale - shift[:, None])
    rescale = tl.exp2(lane_max - shift)
    lane_sum = lane_sum * rescale + tl.sum(p, axis=1)
    if MOMENT:
        lane_moment = lane_moment * rescale + tl.sum(tl.where(p > 0, p * logits, p * 0.0), axis=1)
    if SMOOTHED:
        if WEIGHTED:
            logits *= tl.load(class_weights_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
        lane_smooth += tl.sum(tl.where(cols < width, logits, 0.0), axis=1)
    return new_max, lane_sum, lane_moment, lane_smooth


@triton.jit
def _row_statistics(
    logits_ptr, class_weights_ptr, width, soft_cap, inverse_temperature,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a row of logits in one pass.   -> (lse, the mean logit under the softmax if MOMENT, the sum of the
    (weighted) logits if SMOOTHED)
    """
    # each lane keeps its own maximum and sums, so that the loop has no shuffles
    LANES: tl.constexpr = BLOCK // LANE_LOGITS
    cols = tl.arange(0, LANES)[:, None] * LANE_LOGITS + tl.arange(0, LANE_LOGITS)[None, :]
    lane_max = tl.full((LANES,), -float("inf"), tl.float32)
    lane_sum = tl.zeros((LANES,), tl.float32)
    lane_moment = tl.zeros((LANES,), tl.float32)
    lane_smooth = tl.zeros((LANES,), tl.float32)
    scale = inverse_temperature * LOG2E
    full_width = width // BLOCK * BLOCK
    for start in range(0, full_width, BLOCK):
        lane_max, lane_sum, lane_moment, lane_smooth = _online_softmax_step(
            logits_ptr, class_weights_ptr, start + cols, width, soft_cap, scale,
            lane_max, lane_sum, lane_moment, lane_smooth, WEIGHTED, SMOOTHED, CAPPED, MOMENT, False,
        )  # fmt: skip
    if full_width < width:
        lane_max, lane_sum, lane_moment, lane_smooth = _online_softmax_step(
            logits_ptr, class_weights_ptr, full_width + cols, width, soft_cap, scale,
            lane_max, lane_sum, lane_moment, lane_smooth, WEIGHTED, SMOOTHED, CAPPED, MOMENT, True,
        )  # fmt: skip
    row_max = tl.max(lane_max, axis=0)
    shift = tl.where(row_max == -float("inf"), 0.0, row_max)
    rescale = tl.exp2(lane_max - shift)
    row_sum = tl.sum(mul_rn(lane_sum, rescale), axis=0)
    lse = (row_max + tl.log2(row_sum)) * LN2
    mean_logit = tl.sum(mul_rn(lane_moment, rescale), axis=0) * inverse_temperature / row_sum
    return lse, mean_logit, tl.sum(lane_smooth, axis=0) * inverse_temperature


@triton.jit(do_not_specialize=["ignore_index", "first_class"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, class_weights_ptr, weight_sum_ptr,
    loss_ptr, lse_ptr, logp_ptr, expected_ptr, dloss_ptr, dlse_ptr, dlogp_ptr, dexpected_ptr,
    first_class, width, V, stride, ignore_index, smoothing, z_loss, soft_cap, inverse_temperature,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, STATISTICS_GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics and losses of a row, then its gradient in place of the logits.

    The gradient reads the row once more, its end first: that is still cached. Of V classes the logits are those of
    `width` from `first_class` on; statistics need all of them. dlogits = p_coef * p - class_coef * (class weight) -
    target_coef at the target.

    STATISTICS_GRADS: gradients of lse, logp and expected are given too.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    counted = target != ignore_index
    invalid = counted & ((target < 0) | (target >= V))
    target_class = tl.where(counted & (target >= 0) & (target < V), target, 0)
    target_weight = 1.0
    weight_sum = 1.0 * V
    if WEIGHTED:
        target_weight = tl.load(class_weights_ptr + target_class).to(tl.float32)
        weight_sum = tl.load(weight_sum_ptr)

    if STATISTICS:
        target_raw = tl.load(logits_ptr + target_class)
        target_logit = _apply_soft_cap(target_raw, soft_cap, CAPPED) * inverse_temperature
        lse, expected, smooth = _row_statistics(
            logits_ptr, class_weights_ptr, width, soft_cap, inverse_temperature,
            WEIGHTED, SMOOTHED, CAPPED, not GRADIENT, BLOCK,
        )  # fmt: skip
        logp = target_logit - lse
        loss = -(1 - smoothing) * target_weight * logp + z_loss * lse * lse
        if SMOOTHED:
            loss += smoothing / V * (weight_sum * lse - smooth)
        tl.store(loss_ptr + row, tl.where(invalid, float("nan"), tl.where(counted, loss, 0.0)))
        tl.store(logp_ptr + row, tl.where(invalid, float("nan"), tl.where(counted, logp, 0.0)))
        tl.store(lse_ptr + row, lse)
        if not GRADIENT:
            tl.store(expected_ptr + row, expected)
    else:
        lse = tl.load(lse_ptr + row)

    if GRADIENT:
        dloss = tl.load(dloss_ptr + row)
        dloss = tl.where(invalid, float("nan"), tl.where(counted, dloss, 0.0))
        class_coef = dloss * (smoothing / V)
        target_coef = dloss * (1 - smoothing) * target_weight
        p_coef = target_coef + class_coef * weight_sum + 2 * z_loss * lse * dloss
        if STATISTICS_GRADS:
            dlogp = tl.load(dlogp_ptr + row)
            dlogp = tl.where(invalid, float("nan"), tl.where(counted, dlogp, 0.0))
            p_coef += tl.load(dlse_ptr + row) - dlogp
            target_coef -= dlogp
            dexpected = tl.load(dexpected_ptr + row) * inverse_temperature
            expected = tl.load(expected_ptr + row)
        # from here on by the logits before the temperature
        p_coef *= inverse_temperature
        class_coef *= inverse_temperature
        target_coef *= inverse_temperature
        scale, shift = inverse_temperature * LOG2E, lse * LOG2E
        cols = tl.arange(0, BLOCK)
        for block in range(tl.cdiv(width, BLOCK)):
            start = (tl.cdiv(width, BLOCK) - 1 - block) * BLOCK
            mask = start + cols < width
            raw = tl.load(logits_ptr + start + cols, mask=mask, other=0.0)
            logits = _apply_soft_cap(raw, soft_cap, CAPPED)
            p = tl.exp2(logits * scale - shift)
            if STATISTICS_GRADS:
                dlogits = p * (p_coef + dexpected * (1 + logits * inverse_temperature - expected))
                dlogits = tl.where(p > 0, dlogits, p * 0.0)
            else:
                dlogits = p * p_coef
            if SMOOTHED:
                if WEIGHTED:
                    dlogits -= class_coef * tl.load(
                        class_weights_ptr + first_class + start + cols, mask=mask, other=0.0
                    ).to(tl.float32)
                else:
                    dlogits -= class_coef
            dlogits = tl.where(
                cols == target_class - first_class - start, dlogits - target_coef, dlogits
            )
            if CAPPED:
                tanh = logits / soft_cap
                dlogits *= 1 - tanh * tanh
            tl.store(logits_ptr + start + cols, dlogits.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_to_kernel(t_ptr, scale_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Multiply n elements of t by a scale on the device, and convert them to the dtype of y."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    y = t * tl.load(scale_ptr).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n)
