"""Kernel of fuseops.kernels.dropout."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import overlapped


@triton.jit
def drop(x_ptr, y_ptr, at, n, draw, least, scale):
    """Store the elements `at` that their draws keep, scaled, and zeros for the others."""
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.where(draw.to(tl.int32, bitcast=True) >= least, x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["least"])
def dropout_kernel(
    x_ptr, seed_ptr, y_ptr, n, least, scale,
    PDL: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """A program draws for eight runs of LANES elements, four words a lane. A draw is the high half of a word, or the
    low one moved up: `least` has zeros below.
    """
    overlapped(PDL)
    first = tl.program_id(0).to(tl.int64) * LANES
    lanes = tl.arange(0, LANES)
    words = tl.randint4x(tl.load(seed_ptr), first + lanes, ROUNDS)
    at = 8 * first + lanes
    for k in tl.static_range(4):
        drop(x_ptr, y_ptr, at + 2 * k * LANES, n, words[k], least, scale)
        drop(x_ptr, y_ptr, at + (2 * k + 1) * LANES, n, words[k] << 16, least, scale)
