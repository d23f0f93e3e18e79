"""Dropout whose mask is drawn again in the backward, never stored. Triton, sm_80 and later."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit(do_not_specialize=["least"])
def dropout_kernel(
    x_ptr, seed_ptr, y_ptr, n, least, scale,
    PDL: tl.constexpr, COUNTERS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Draw and apply the mask of 8 * COUNTERS elements a program: one Philox counter for eight neighbours.

    A draw is the high half of a 32-bit word, or the low one moved up; `least`, the smallest draw that is kept, has
    zeros below. The words are laid out as the elements are loaded, so nothing passes between threads.
    """
    pdl_trigger_and_wait(PDL)
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    offsets = counter[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), counter, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(COUNTERS, 4)
    draws = tl.join(words, words << 16).reshape(COUNTERS, 8).to(tl.int32, bitcast=True)
    y = tl.where(draws >= least, x * scale, 0.0)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n)
