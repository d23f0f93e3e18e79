"""Kernels of fuseops.kernels.cross_entropy: a program owns the logits of one token and walks over them in blocks."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import mul_rn

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EACH = tl.constexpr(8)  # logits of a lane that share one running maximum


@triton.jit
def _capped(raw, soft_cap, CAPPED: tl.constexpr):
    """The logits that the GEMM gave, capped, in float32; what the loss is taken of is this over the temperature."""
    logits = raw.to(tl.float32)
    if CAPPED:
        logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)  # tanh
    return logits


@triton.jit
def _block_statistics(
    logits_ptr, class_weights_ptr, at, width, soft_cap, scale, most, total, moment, smooth,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, MOMENT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A lane's maximum, in powers of two, and its sums, with a block of (lanes, EACH) logits taken in."""
    if MASKED:
        raw = tl.load(logits_ptr + at, mask=at < width, other=-float("inf"))
        logits = tl.where(at < width, _capped(raw, soft_cap, CAPPED), -float("inf"))
    else:
        logits = _capped(tl.load(logits_ptr + at), soft_cap, CAPPED)
    new = tl.maximum(most, tl.max(logits, axis=1) * scale)
    shift = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(logits * scale - shift[:, None])
    rest = tl.exp2(most - shift)
    total = total * rest + tl.sum(p, axis=1)
    if MOMENT:
        moment = moment * rest + tl.sum(tl.where(p > 0, p * logits, p * 0.0), axis=1)
    if SMOOTHED:
        if WEIGHTED:
            logits *= tl.load(class_weights_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        smooth += tl.sum(tl.where(at < width, logits, 0.0), axis=1)
    return new, total, moment, smooth


@triton.jit
def _statistics(
    logits_ptr, class_weights_ptr, width, soft_cap, inverse,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(lse, the mean logit if MOMENT, sum of w l if SMOOTHED) of a row."""
    # each lane keeps its own maximum and sums, so that nothing is exchanged within the loop
    LANES: tl.constexpr = BLOCK // EACH
    cols = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    most = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    smooth = tl.zeros((LANES,), tl.float32)
    scale = inverse * LOG2E
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        most, total, moment, smooth = _block_statistics(
            logits_ptr, class_weights_ptr, start + cols, width, soft_cap, scale,
            most, total, moment, smooth, WEIGHTED, SMOOTHED, CAPPED, MOMENT, False,
        )  # fmt: skip
    if whole < width:
        most, total, moment, smooth = _block_statistics(
            logits_ptr, class_weights_ptr, whole + cols, width, soft_cap, scale,
            most, total, moment, smooth, WEIGHTED, SMOOTHED, CAPPED, MOMENT, True,
        )  # fmt: skip
    top = tl.max(most, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    rest = tl.exp2(most - shift)
    sum_of_all = tl.sum(mul_rn(total, rest), axis=0)
    lse = (top + tl.log2(sum_of_all)) * LN2
    mean = tl.sum(mul_rn(moment, rest), axis=0) * inverse / sum_of_all
    return lse, mean, tl.sum(smooth, axis=0) * inverse


@triton.jit(do_not_specialize=["ignore_index", "first"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, class_weights_ptr, total_ptr,
    loss_ptr, lse_ptr, logp_ptr, expected_ptr, dloss_ptr, dlse_ptr, dlogp_ptr, dexpected_ptr,
    first, width, V, stride, ignore_index, smoothing, z_loss, soft_cap, inverse,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of a row, then its gradient in place, which reads it once more, its end first: that is still cached.

    Of V classes the logits are those of `width` from `first` on; statistics need all of them.
    OTHERS: gradients of lse, logp and expected are given too. inverse: 1 / temperature
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    outside = counts & ((target < 0) | (target >= V))
    at = tl.where(counts & (target >= 0) & (target < V), target, 0)
    weight = 1.0
    total = 1.0 * V
    if WEIGHTED:
        weight = tl.load(class_weights_ptr + at).to(tl.float32)
        total = tl.load(total_ptr)

    if STATISTICS:
        chosen = _capped(tl.load(logits_ptr + at), soft_cap, CAPPED) * inverse
        lse, expected, smooth = _statistics(
            logits_ptr, class_weights_ptr, width, soft_cap, inverse,
            WEIGHTED, SMOOTHED, CAPPED, not GRADIENT, BLOCK,
        )  # fmt: skip
        logp = chosen - lse
        loss = -(1 - smoothing) * weight * logp + z_loss * lse * lse
        if SMOOTHED:
            loss += smoothing / V * (total * lse - smooth)
        tl.store(loss_ptr + row, tl.where(outside, float("nan"), tl.where(counts, loss, 0.0)))
        tl.store(logp_ptr + row, tl.where(outside, float("nan"), tl.where(counts, logp, 0.0)))
        tl.store(lse_ptr + row, lse)
        if not GRADIENT:
            tl.store(expected_ptr + row, expected)
    else:
        lse = tl.load(lse_ptr + row)

    if GRADIENT:
        dloss = tl.load(dloss_ptr + row)
        dloss = tl.where(outside, float("nan"), tl.where(counts, dloss, 0.0))
        each = dloss * (smoothing / V)
        hard = dloss * (1 - smoothing) * weight
        every = hard + each * total + 2 * z_loss * lse * dloss
        if OTHERS:
            dlogp = tl.load(dlogp_ptr + row)
            dlogp = tl.where(outside, float("nan"), tl.where(counts, dlogp, 0.0))
            every += tl.load(dlse_ptr + row) - dlogp
            hard -= dlogp
            dexpected = tl.load(dexpected_ptr + row) * inverse
            expected = tl.load(expected_ptr + row)
        # by the logits before the temperature, from here on
        every, each, hard = every * inverse, each * inverse, hard * inverse
        scale, shift = inverse * LOG2E, lse * LOG2E
        cols = tl.arange(0, BLOCK)
        for block in range(tl.cdiv(width, BLOCK)):
            start = (tl.cdiv(width, BLOCK) - 1 - block) * BLOCK
            mask = start + cols < width
            raw = tl.load(logits_ptr + start + cols, mask=mask, other=0.0)
            logits = _capped(raw, soft_cap, CAPPED)
            p = tl.exp2(logits * scale - shift)
            if OTHERS:
                d = p * (every + dexpected * (1 + logits * inverse - expected))
                d = tl.where(p > 0, d, p * 0.0)
            else:
                d = p * every
            if SMOOTHED:
                if WEIGHTED:
                    d -= each * tl.load(
                        class_weights_ptr + first + start + cols, mask=mask, other=0.0
                    ).to(tl.float32)
                else:
                    d -= each
            d = tl.where(cols == at - first - start, d - hard, d)
            if CAPPED:
                tanh = logits / soft_cap
                d *= 1 - tanh * tanh
            tl.store(logits_ptr + start + cols, d.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_to_kernel(t_ptr, scale_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = t * tl.load(scale_ptr).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)
