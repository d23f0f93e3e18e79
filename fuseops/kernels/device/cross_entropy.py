"""Kernel of fuseops.kernels.cross_entropy: a program owns the logits of one token and walks over them in blocks."""

import triton
import triton.language as tl


@triton.jit
def _final(logits, soft_cap, temperature, CAPPED: tl.constexpr):
    """What the loss is taken of: the logits that the GEMM gave, capped and divided."""
    logits = logits.to(tl.float32)
    if CAPPED:
        logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)  # tanh
    return logits / temperature


@triton.jit
def _statistics(
    logits_ptr, class_weights_ptr, cols, width, soft_cap, temperature,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(lse, the mean logit if MOMENT, sum of w l if SMOOTHED) of a row."""
    # each lane keeps its own maximum and sums, so that nothing is exchanged within the loop
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    scale = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    smooth = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + cols < width
        raw = tl.load(logits_ptr + start + cols, mask=mask, other=0.0)
        logits = tl.where(mask, _final(raw, soft_cap, temperature, CAPPED), -float("inf"))
        new = tl.maximum(most, logits)
        shift = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(logits - shift)
        rest = tl.exp(most - shift)
        scale = scale * rest + p
        if MOMENT:
            moment = moment * rest + tl.where(p > 0, p * logits, p * 0.0)
        if SMOOTHED:
            if WEIGHTED:
                logits *= tl.load(class_weights_ptr + start + cols, mask=mask, other=0.0).to(
                    tl.float32
                )
            smooth += tl.where(mask, logits, 0.0)
        most = new
    top = tl.max(most, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    rest = tl.exp(most - shift)
    total_scale = tl.sum(scale * rest, axis=0)
    lse = top + tl.log(total_scale)
    mean = tl.sum(moment * rest, axis=0) / total_scale
    return lse, mean, tl.sum(smooth, axis=0)


@triton.jit(do_not_specialize=["ignore_index", "first"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, class_weights_ptr, total_ptr,
    loss_ptr, lse_ptr, logp_ptr, expected_ptr, dloss_ptr, dlse_ptr, dlogp_ptr, dexpected_ptr,
    first, width, V, stride, ignore_index, smoothing, z_loss, soft_cap, temperature,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of a row, then its gradient in place, which reads it once more, from the cache if it fits.

    Of V classes the logits are those of `width` from `first` on; statistics need all of them.
    OTHERS: gradients of lse, logp and expected are given too.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    cols = tl.arange(0, BLOCK)
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
        chosen = _final(tl.load(logits_ptr + at), soft_cap, temperature, CAPPED)
        lse, expected, smooth = _statistics(
            logits_ptr, class_weights_ptr, cols, width, soft_cap, temperature,
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
            dexpected = tl.load(dexpected_ptr + row)
            expected = tl.load(expected_ptr + row)
        for start in range(0, width, BLOCK):
            mask = start + cols < width
            raw = tl.load(logits_ptr + start + cols, mask=mask, other=0.0)
            logits = _final(raw, soft_cap, temperature, CAPPED)
            p = tl.exp(logits - lse)
            if OTHERS:
                d = p * (every + dexpected * (1 + logits - expected))
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
            d = tl.where(first + start + cols == at, d - hard, d)
            if CAPPED:
                tanh = logits * (temperature / soft_cap)
                d *= 1 - tanh * tanh
            d = d / temperature
            tl.store(logits_ptr + start + cols, d.to(logits_ptr.dtype.element_ty), mask=mask)
