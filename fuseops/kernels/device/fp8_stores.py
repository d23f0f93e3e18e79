"""The end of a wave of an FP8 GEMM: scales that are the same for all of K, the bias, and the store."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .fp8_rings import ragged
from .gluon_names import store_tile

PANEL = gl.constexpr(64)  # columns of what one TMA stores


@gluon.jit
def scaled(acc, ends, place, row, col, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr):
    """acc times the scales of its rows and columns, or of its group, plus the bias."""
    a_scale, b_scale, bias_ptr, a_step, b_step = ends
    group, start, size, _, N = place
    rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    if SCALING == "tensor":
        acc *= gl.load(a_scale + group * a_step) * gl.load(b_scale + group * b_step)
    elif SCALING == "row":
        by_row = gl.load(a_scale + start + rows, mask=rows < size, other=0.0)
        by_col = gl.load(b_scale + group * N + cols, mask=cols < N, other=0.0)
        acc = acc * by_row[:, None] * by_col[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + group * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def store_wave(
    out, ends, acc, place, row, col,
    WGRAD: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    WAVE: gl.constexpr,
):  # fmt: skip
    """16-bit results leave by TMA, which ends at the group's rows and at the columns; float32 by pointers."""
    group, start, size, M, N = place
    acc = scaled(acc, ends, place, row, col, SCALING, HAS_BIAS)
    if out[0].dtype.element_ty == gl.float32:
        layout: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        if WGRAD:
            to = out[0] + group.to(gl.int64) * M * N + rows.to(gl.int64) * N + cols
            mask = (rows < M) & (cols < N)
        else:
            to = out[0] + (start + rows).to(gl.int64) * N + cols
            mask = (rows < size) & (cols < N)
        if ACCUMULATE:
            acc += gl.load(to, mask=mask, other=0.0)
        gl.store(to, acc, mask=mask)
    else:
        _, tiles, buffers = out
        buffer = buffers.index(WAVE % buffers.shape[0])
        tma.store_wait(buffers.shape[0] - 1)
        buffer.store(acc.to(tiles.dtype))
        fence_async_shared()
        for i in gl.static_range(acc.shape[1] // PANEL):
            panel = buffer.slice(i * PANEL, PANEL, 1)
            if WGRAD:
                store_tile(tiles, [group, row, col + i * PANEL], panel)
            else:
                store_tile(tiles, ragged(start, size, row, col + i * PANEL), panel)
