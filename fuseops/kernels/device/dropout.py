"""Kernel of fuseops.kernels.dropout."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import overlapped


@triton.jit
def drop(x_ptr, y_ptr, at, n, word, threshold, scale):
    """Store the elements `at` that their words keep, scaled, and zeros for the others."""
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.where(word.to(tl.int32, bitcast=True) >= threshold, x * scale, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    x_ptr, seed_ptr, y_ptr, n, threshold, scale,
    PDL: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """A program draws four words a counter, for four runs of LANES elements."""
    overlapped(PDL)
    first = tl.program_id(0).to(tl.int64) * LANES
    lanes = tl.arange(0, LANES)
    words = tl.randint4x(tl.load(seed_ptr), first + lanes, ROUNDS)
    for k in tl.static_range(4):
        drop(x_ptr, y_ptr, 4 * first + k * LANES + lanes, n, words[k], threshold, scale)
