"""Epilogue of Hopper's weight-gradient GEMMs whose result is float32: TMA stores or adds the accumulator.

The accumulator goes through shared memory in boxes of 64 x 32, the widest that a 128-byte swizzle allows in float32.
Accumulation is a TMA reduction: the L2 cache adds, so no thread reads the old gradient or waits for it. A launch adds
to each element once, so the result has the same bits in any order of tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .gluon_gemm import Descriptor, column_halves
from .gluon_names import add_tile, store_tile

F32_BOX_COLS = gl.constexpr(32)  # columns of a TMA box, 128 bytes
F32_SMEM_LAYOUT = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float32)


class Float32GradDescriptor(Descriptor):
    """A `Float32GradDescriptor` is the TMA descriptor of a float32 weight gradient."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = F32_SMEM_LAYOUT


def describe_sums(t, rows=64):
    """Make the TMA descriptor of a weight gradient (E, N, K) or (N, K), in boxes of (rows, 32)."""
    n, k = t.shape[-2:]
    return Float32GradDescriptor(t, (t.numel() // (n * k), n, k), (n * k, k, 1), [1, rows, 32])


@gluon.jit
def store_box(dw, box, group, row, col, ACCUMULATE: gl.constexpr):
    """Store or add a box of shared memory at (group, row, col) of dw, without waiting for it."""
    if ACCUMULATE:
        add_tile(dw, [group, row, col], box)
    else:
        store_tile(dw, [group, row, col], box)


@gluon.jit
def store_float32_grad(
    dw, buffers, acc, group, row, col,
    TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr, BOX_INDEX: gl.constexpr,
):  # fmt: skip
    """Store or add acc (64 rows), or its transpose, to dw at (group, row, col), 32 columns at a time.

    Recursion halves acc down to 32 columns. Box i is staged in buffer i modulo their number; BOX_INDEX counts the
    boxes of the tile before acc. Buffers are (64, 32) or, TRANSPOSED, (32, 64), which are two TMA boxes of 32 x 32.
    `store_wait` leaves in flight what the other buffers hold: the buffer to be overwritten has been read.
    """
    HALF: gl.constexpr = acc.shape[1] // 2
    if HALF >= F32_BOX_COLS:
        left, right = column_halves(acc)
        store_float32_grad(dw, buffers, left, group, row, col, TRANSPOSED, ACCUMULATE, BOX_INDEX)
        store_float32_grad(
            dw, buffers, right, group, row, col + HALF,
            TRANSPOSED, ACCUMULATE, BOX_INDEX + HALF // F32_BOX_COLS,
        )  # fmt: skip
    else:
        buffer = buffers.index(BOX_INDEX % buffers.shape[0])
        tma.store_wait((buffers.shape[0] - 1) * (1 + TRANSPOSED))
        if TRANSPOSED:
            buffer.permute((1, 0)).store(acc)
            fence_async_shared()
            store_box(dw, buffer.slice(0, F32_BOX_COLS, 1), group, col, row, ACCUMULATE)
            store_box(
                dw,
                buffer.slice(F32_BOX_COLS, F32_BOX_COLS, 1),
                group,
                col,
                row + F32_BOX_COLS,
                ACCUMULATE,
            )
        else:
            buffer.store(acc)
            fence_async_shared()
            store_box(dw, buffer, group, row, col, ACCUMULATE)
