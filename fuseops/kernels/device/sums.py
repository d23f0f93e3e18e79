"""How float32 weight gradients of Hopper's GEMMs leave: by TMA, which L2 adds to what is there, so that nobody reads it
and nobody waits. One addition an element and launch: the same bits in any order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .gluon_names import add_tile, store_tile
from .grouped_dswiglu import column_halves
from .grouped_rings import Descriptor

PART = gl.constexpr(32)  # columns of what one TMA stores
FLOATS = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float32)


class Sums(Descriptor):
    """A descriptor of a float32 weight gradient."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = FLOATS


def describe_sums(t, rows=64):
    """A weight gradient (E, N, K) or (N, K) in parts of so many rows, by 32."""
    n, k = t.shape[-2:]
    return Sums(t, (t.numel() // (n * k), n, k), (n * k, k, 1), [1, rows, 32])


@gluon.jit
def store_part(dw, part, group, row, col, ACCUMULATE: gl.constexpr):
    if ACCUMULATE:
        add_tile(dw, [group, row, col], part)
    else:
        store_tile(dw, [group, row, col], part)


@gluon.jit
def store_sums(
    dw, buffers, acc, group, row, col,
    TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Store or add acc (64 rows), or its transpose, 32 columns at a time, each from the buffer whose turn it is: NUMBER
    of the first. Buffers are (64, 32), or (32, 64), which leave as two squares.
    """
    HALF: gl.constexpr = acc.shape[1] // 2
    if HALF >= PART:
        left, right = column_halves(acc)
        store_sums(dw, buffers, left, group, row, col, TRANSPOSED, ACCUMULATE, NUMBER)
        store_sums(
            dw, buffers, right, group, row, col + HALF,
            TRANSPOSED, ACCUMULATE, NUMBER + HALF // PART,
        )  # fmt: skip
    else:
        buffer = buffers.index(NUMBER % buffers.shape[0])
        tma.store_wait((buffers.shape[0] - 1) * (1 + TRANSPOSED))
        if TRANSPOSED:
            buffer.permute((1, 0)).store(acc)
            fence_async_shared()
            store_part(dw, buffer.slice(0, PART, 1), group, col, row, ACCUMULATE)
            store_part(dw, buffer.slice(PART, PART, 1), group, col, row + PART, ACCUMULATE)
        else:
            buffer.store(acc)
            fence_async_shared()
            store_part(dw, buffer, group, row, col, ACCUMULATE)
