"""The end of a wave of an FP8 GEMM: scales that are the same for all of K, the bias, and the store, of values or of
codes with a scale for the 128 columns of a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .fp8_rings import ragged
from .gluon_names import store_tile
from .grouped_dswiglu import column_halves
from .sums import F32_BOX_COLS, store_float32_grad

PANEL = gl.constexpr(64)  # columns of what one TMA stores


@gluon.jit
def scaled(acc, ends, place, row, col, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr):
    """acc times the scales of its rows and columns, or of its group, plus the bias."""
    a_scale, b_scale, bias_ptr, a_step, b_step, _, _ = ends
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
def store_float32(out_ptr, acc, place, row, col):
    """Rows of float32, which begin anywhere, where no TMA does, a half at a time: less to hold."""
    _, start, size, _, N = place
    if acc.shape[1] > PANEL:
        left, right = column_halves(acc)
        store_float32(out_ptr, left, place, row, col)
        store_float32(out_ptr, right, place, row, col + acc.shape[1] // 2)
    else:
        layout: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        to = out_ptr + (start.to(gl.int64) + rows) * N + cols
        gl.store(to, acc, mask=(rows < size) & (cols < N))


@gluon.jit
def coded(acc):
    """(acc, rounded to bf16, times an inverse scale a row, the scales): as device.operands.power_of_two, of e4m3."""
    acc = acc.to(gl.bfloat16).to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(acc), axis=1), 0.0)
    bits = gl.minimum(amax, 3.4028234663852886e38).to(gl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(262 - (bits >> 23) - above, 190)
    inv = (exponent << 23).to(gl.float32, bitcast=True)
    return acc * inv[:, None], ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def zero_scales(scale_ptr, offs_ptr, R, E, N):
    """Zero the scales of the rows at and beyond offs[-1]."""
    step = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    end = gl.load(offs_ptr + E - 1)
    for block in range(gl.program_id(0), N // 128, gl.num_programs(0)):
        for row in range(end, R, 128):
            to = scale_ptr + block.to(gl.int64) * R + row + step
            gl.store(to, (0 * step).to(gl.float32), mask=row + step < R)


@gluon.jit
def store_codes(out, ends, acc, place, row, col, WAVE: gl.constexpr):
    """Codes leave by one TMA, their scales (N / 128, R) by pointers. 128 divides N."""
    _, start, size, _, N = place
    _, _, _, _, _, scale_ptr, all_rows = ends
    _, tiles, buffers = out
    acc, scale = coded(acc)
    if col < N:
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        to = scale_ptr + (col // 128).to(gl.int64) * all_rows + start + rows
        gl.store(to, scale, mask=rows < size)
    buffer = buffers.index(WAVE % buffers.shape[0])
    tma.store_wait(buffers.shape[0] - 1)
    buffer.store(acc.to(tiles.dtype))
    fence_async_shared()
    store_tile(tiles, ragged(start, size, row, col), buffer)


@gluon.jit
def store_wave(
    out, ends, acc, place, row, col,
    WGRAD: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    WAVE: gl.constexpr,
):  # fmt: skip
    """Results leave by TMA, which ends at the group's rows and at the columns, but for rows of float32."""
    group, start, size, _, _ = place
    acc = scaled(acc, ends, place, row, col, SCALING, HAS_BIAS)
    if out[0].dtype.element_ty == gl.float32:
        if WGRAD:
            _, tiles, buffers = out
            number: gl.constexpr = WAVE * acc.shape[1] // F32_BOX_COLS
            store_float32_grad(tiles, buffers, acc, group, row, col, False, ACCUMULATE, number)
        else:
            store_float32(out[0], acc, place, row, col)
    elif out[0].dtype.element_ty == gl.float8e4nv:
        store_codes(out, ends, acc, place, row, col, WAVE)
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
