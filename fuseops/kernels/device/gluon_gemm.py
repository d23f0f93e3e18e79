"""What Hopper's GEMMs in Gluon share: TMA descriptors, the order of tiles, rows of groups, and parts of accumulators.

Functions of Triton that need no layout are compiled as they are, so that both kinds of GEMM decode tiles alike.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import grouped_mm, groups
from .grouped_mm import ZERO_BLOCK, ragged_shape

load_group_rows = gluon.jit(groups.load_group_rows.fn)
ragged_coords = gluon.jit(grouped_mm.ragged_coords.fn)
swizzle = gluon.jit(grouped_mm.swizzle.fn)
SWIZZLE_128B = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)


class Address:
    """An `Address` is what a descriptor needs of its tensor, dtype and pointer, without keeping its memory alive."""

    def __init__(self, t):
        self.dtype, self._address = t.dtype, t.data_ptr()
        self.rehearsed = t if t.is_meta else None  # meta tensors have no memory to keep alive

    def data_ptr(self):
        return self._address


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """A `Descriptor` is a TMA descriptor with 128-byte swizzle, without Gluon's checks: the launcher has made them."""

    # all instances share a layout, so that a launch is told by dtype and block alone
    one_layout = True

    def __init__(self, t, shape, strides, block_shape):
        self.base, self.shape = Address(t), shape
        self.strides, self.block_shape = strides, block_shape
        self.layout, self.padding = SWIZZLE_128B, "zero"


def describe_rows(t, box_rows=64):
    """Make the ragged descriptor of a matrix (R, N) of 16 bits whose rows form groups, in boxes of (box_rows, 64).

    `ragged_coords` gives its coordinates.
    """
    return Descriptor(t, *ragged_shape(t), [1, 1, box_rows, 64])


def describe_weight(t):
    """Make the descriptor of a weight gradient (E, N, K) or (N, K) of 16 bits, in boxes of 64 x 64.

    It may be a view of some rows or columns of larger matrices.
    """
    n, k = t.shape[-2:]
    strides = t.stride() if t.dim() == 3 else (n * k, *t.stride())
    return Descriptor(t, (t.numel() // (n * k), n, k), strides, [1, 64, 64])


@gluon.jit
def column_halves(acc):
    """Split (M, N) in registers into its left and its right (M, N / 2)."""
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape((M, 2, N // 2)).permute((0, 2, 1)).split()


@gluon.jit
def split_columns(acc, WIDTH: gl.constexpr):
    """Split (M, N) in registers into a tuple of (M, WIDTH), from left to right."""
    if acc.shape[1] > WIDTH:
        left, right = column_halves(acc)
        parts = split_columns(left, WIDTH) + split_columns(right, WIDTH)
    else:
        parts = (acc,)
    return parts


@gluon.jit
def zero_padding(y_ptr, offs_ptr, R, E, N):
    """Zero the padding rows of y (R, N), those at and beyond offs[-1]; all programs of the grid share them."""
    offsets = gl.arange(0, ZERO_BLOCK, layout=gl.BlockedLayout([8], [32], [4], [0]))
    end = R.to(gl.int64) * N
    begin = gl.load(offs_ptr + E - 1).to(gl.int64) * N + gl.program_id(0) * ZERO_BLOCK
    for i in range(begin, end, gl.num_programs(0) * ZERO_BLOCK):
        gl.store(
            y_ptr + i + offsets, (0 * offsets).to(y_ptr.dtype.element_ty), mask=i + offsets < end
        )
