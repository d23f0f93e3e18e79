"""Epilogue of Hopper's FP8 GEMM (`fp8_gemm`), for one 64-row subtile of a consumer's accumulator at a time.

It applies scales that are constant over K (a row's or a tensor's) and the bias, and stores by TMA through a buffer in
shared memory: bf16 and fp16 in boxes of 64 x 64, codes with one scale for the 128 columns of a row, float32 weight
gradients as in `sums`. Only rows of float32 are stored by pointers, from registers. Stores stay in flight while the
next tile multiplies: `store_wait` before a buffer is overwritten waits for the store that read that buffer.

Tuples: epilogue = (a_scale, b_scale, bias_ptr, a_step, b_step, out_scale_ptr, total_rows), where a step is 0 for one
scale for all groups; bounds = (group, group_start, group_rows, M, N); out = (out_ptr, out_desc, buffers). `row` counts
from the group's first row, `col` from the matrix's first column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import operands
from .gluon_gemm import column_halves, ragged_coords
from .gluon_names import store_tile
from .sums import F32_BOX_COLS, store_float32_grad

BOX_COLS = gl.constexpr(64)  # columns of a TMA box of 16-bit numbers, 128 bytes
# that of `quantize_operand`, bit for bit
power_of_two_scale = gluon.jit(operands.power_of_two_scale.fn)


@gluon.jit
def scale_and_bias(acc, epilogue, bounds, row, col, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Return acc times the scales of its rows and columns ("row"), or of its group ("tensor"), plus the bias."""
    a_scale, b_scale, bias_ptr, a_step, b_step, _, _ = epilogue
    group, group_start, group_rows, _, N = bounds
    rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    if SCALING == "tensor":
        acc *= gl.load(a_scale + group * a_step) * gl.load(b_scale + group * b_step)
    elif SCALING == "row":
        row_scale = gl.load(a_scale + group_start + rows, mask=rows < group_rows, other=0.0)
        col_scale = gl.load(b_scale + group * N + cols, mask=cols < N, other=0.0)
        acc = acc * row_scale[:, None] * col_scale[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + group * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def store_float32_rows(out_ptr, acc, bounds, row, col):
    """Store float32 rows of a group by pointers: they begin at any row, and TMA at multiples of 16 bytes only.

    Recursion stores 64 columns at a time, so that fewer addresses are live in registers.
    """
    _, group_start, group_rows, _, N = bounds
    if acc.shape[1] > BOX_COLS:
        left, right = column_halves(acc)
        store_float32_rows(out_ptr, left, bounds, row, col)
        store_float32_rows(out_ptr, right, bounds, row, col + acc.shape[1] // 2)
    else:
        layout: gl.constexpr = acc.type.layout
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        out_ptrs = out_ptr + (group_start.to(gl.int64) + rows) * N + cols
        gl.store(out_ptrs, acc, mask=(rows < group_rows) & (cols < N))


@gluon.jit
def quantize_rows(acc):
    """Return (acc, rounded to bf16, times the inverse scales, scales), one power of two for each row, for e4m3.

    The scale is amax / 448, rounded up to a power of two, at least 2^-63; 448 is 1.75 * 2^8.
    """
    acc = acc.to(gl.bfloat16).to(gl.float32)
    inv, scale = power_of_two_scale(gl.maximum(gl.max(gl.abs(acc), axis=1), 0.0), 8)
    return acc * inv[:, None], scale


@gluon.jit
def zero_padding_scales(scale_ptr, offs_ptr, R, E, N):
    """Zero the scales (N / 128, R) of padding rows, those at and beyond offs[-1]."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first_padding = gl.load(offs_ptr + E - 1)
    for block in range(gl.program_id(0), N // 128, gl.num_programs(0)):
        for row in range(first_padding, R, 128):
            scale_ptrs = scale_ptr + block.to(gl.int64) * R + row + lane
            gl.store(scale_ptrs, (0 * lane).to(gl.float32), mask=row + lane < R)


@gluon.jit
def store_codes(out, epilogue, acc, bounds, row, col, SUBTILE: gl.constexpr):
    """Quantize acc (64, 128) and store its codes by one TMA, its scales (N / 128, R) by pointers. 128 divides N."""
    _, group_start, group_rows, _, N = bounds
    _, _, _, _, _, scale_ptr, total_rows = epilogue
    _, out_desc, buffers = out
    acc, scale = quantize_rows(acc)
    if col < N:
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        scale_ptrs = scale_ptr + (col // 128).to(gl.int64) * total_rows + group_start + rows
        gl.store(scale_ptrs, scale, mask=rows < group_rows)
    buffer = buffers.index(SUBTILE % buffers.shape[0])
    tma.store_wait(buffers.shape[0] - 1)
    buffer.store(acc.to(out_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, ragged_coords(group_start, group_rows, row, col), buffer)


@gluon.jit
def store_subtile(
    out, epilogue, acc, bounds, row, col,
    WGRAD: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    SUBTILE: gl.constexpr,
):  # fmt: skip
    """Run the epilogue of one subtile: scale acc, add the bias and store it, or add it to a float32 weight gradient.

    TMA drops what lies beyond the group's rows and the N columns. SUBTILE, 0 or 1, chooses the buffer.
    """
    group, group_start, group_rows, _, _ = bounds
    acc = scale_and_bias(acc, epilogue, bounds, row, col, SCALING, HAS_BIAS)
    if out[0].dtype.element_ty == gl.float32:
        if WGRAD:
            _, out_desc, buffers = out
            box_index: gl.constexpr = SUBTILE * acc.shape[1] // F32_BOX_COLS
            store_float32_grad(
                out_desc, buffers, acc, group, row, col, False, ACCUMULATE, box_index
            )
        else:
            store_float32_rows(out[0], acc, bounds, row, col)
    elif out[0].dtype.element_ty == gl.float8e4nv:
        store_codes(out, epilogue, acc, bounds, row, col, SUBTILE)
    else:
        _, out_desc, buffers = out
        BOXES: gl.constexpr = acc.shape[1] // BOX_COLS
        buffer = buffers.index(SUBTILE % buffers.shape[0])
        tma.store_wait((buffers.shape[0] - 1) * BOXES)
        buffer.store(acc.to(out_desc.dtype))
        fence_async_shared()
        for i in gl.static_range(BOXES):
            box = buffer.slice(i * BOX_COLS, BOX_COLS, 1)
            if WGRAD:
                store_tile(out_desc, [group, row, col + i * BOX_COLS], box)
            else:
                store_tile(
                    out_desc, ragged_coords(group_start, group_rows, row, col + i * BOX_COLS), box
                )
