"""The end of a wave of an FP8 GEMM: scales that are the same for all of K, the bias, and the store."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .fp8_rings import ragged
from .gluon_names import store_tile
from .grouped_dswiglu import column_halves

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
def store_float32(
    out_ptr, acc, place, row, col, WGRAD: gl.constexpr, ACCUMULATE: gl.constexpr
):  # fmt: skip
    """A half at a time: less to hold beside the other wave."""
    group, start, size, M, N = place
    if acc.shape[1] > PANEL:
        left, right = column_halves(acc)
        store_float32(out_ptr, left, place, row, col, WGRAD, ACCUMULATE)
        store_float32(out_ptr, right, place, row, col + acc.shape[1] // 2, WGRAD, ACCUMULATE)
    else:
        layout: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        first = group.to(gl.int64) * M if WGRAD else start.to(gl.int64)
        to = out_ptr + (first + rows) * N + cols
        mask = (rows < (M if WGRAD else size)) & (cols < N)
        if ACCUMULATE:
            acc += gl.load(to, mask=mask, other=0.0)
        gl.store(to, acc, mask=mask)


@gluon.jit
def store_wave(
    out, ends, acc, place, row, col,
    WGRAD: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    WAVE: gl.constexpr,
):  # fmt: skip
    """16-bit results leave by TMA, which ends at the group's rows and at the columns; float32 by pointers."""
    group, start, size, _, _ = place
    acc = scaled(acc, ends, place, row, col, SCALING, HAS_BIAS)
    if out[0].dtype.element_ty == gl.float32:
        store_float32(out[0], acc, place, row, col, WGRAD, ACCUMULATE)
    else:
        _, tiles, buffers = out
        PANELS: gl.constexpr = acc.shape[1] // PANEL
        buffer = buffers.index(WAVE % buffers.shape[0])
        tma.store_wait((buffers.shape[0] - 1) * PANELS)
        buffer.store(acc.to(tiles.dtype))
        fence_async_shared()
        for i in gl.static_range(PANELS):
            panel = buffer.slice(i * PANEL, PANEL, 1)
            if WGRAD:
                store_tile(tiles, [group, row, col + i * PANEL], panel)
            else:
                store_tile(tiles, ragged(start, size, row, col + i * PANEL), panel)
