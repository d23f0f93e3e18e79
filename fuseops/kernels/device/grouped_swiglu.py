"""Epilogue of the grouped GEMM (`grouped_pingpong` with ACT) that goes on through an activation: SwiGLU, plain or
clamped, or squared ReLU.

The accumulator is h. It is staged in shared memory SUBTILE columns at a time (32 gates and the 32 up columns that they
gate), and one short loop over subtiles of 32 rows writes h and act(h) * probs: unrolled over the registers of the
accumulator the code does not fit the instruction cache. Slices of 64 columns would take the shared memory of the ring's
fifth stage, without which the mainloop stalls for a tenth of its time.

Gate and up are halves of h's columns (GATE_UP_SPLIT: the tile holds as many of both, side by side), or alternate
(INTERLEAVED). `group_info` is (group, start, size, N), N the columns of h.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_gemm import split_columns
from .gluon_names import reinterpret
from .grouped_dswiglu import sigmoid

SUBTILE = gl.constexpr(32)  # rows of a subtile, and columns


@gluon.jit
def alloc_act_buffers(dtype: gl.constexpr, NUM_HALVES: gl.constexpr, WG_M: gl.constexpr):
    """Allocate the smem buffers of one consumer, (NUM_HALVES, WG_M, SUBTILE): of gate and up where these are halves."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WG_M, SUBTILE], dtype)
    return gl.allocate_shared_memory(dtype, [NUM_HALVES, WG_M, SUBTILE], layout)


@gluon.jit
def load_row_scale(probs_ptr, start, size, rows, HAS_PROBS: gl.constexpr):
    """Load probs of rows of a group, or return ones."""
    if HAS_PROBS:
        scale = gl.load(probs_ptr + start + rows, mask=rows < size, other=0.0)
    else:
        scale = gl.full(rows.shape, 1.0, gl.float32, layout=rows.type.layout)
    return scale


@gluon.jit
def squared_relu(x):
    """Compute relu(x) ** 2; NaN passes through, as in torch."""
    relu = gl.where(x <= 0.0, 0.0, x)
    return relu * relu


@gluon.jit
def gated_act(
    gate, up, ACT: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr
):
    """Compute the gated activation of float32 gate and up, as `act.py` does."""
    if ACT == "swiglu":
        return gate * sigmoid(gate) * up
    else:
        gl.static_assert(ACT == "clamped_swiglu", "unknown activation")
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
        return gate * sigmoid(ALPHA * gate) * up


@gluon.jit
def add_bias(acc, bias_ptr, group_info, col, HAS_BIAS: gl.constexpr):
    """Add the group's bias of columns col, col + 1, ... to a slice of the accumulator."""
    if HAS_BIAS:
        group, _, _, N = group_info
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + group.to(gl.int64) * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def act_epilogue(
    acc, out, act_out, HAS_BIAS: gl.constexpr, ACT: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, OFFSET: gl.constexpr, HAS_PROBS: gl.constexpr, NEED_H: gl.constexpr,
):  # fmt: skip
    """Write h if NEED_H, and act(h) * probs, of a tile whose accumulator is h.

    out is (y_desc, h_ptr, bias_ptr, smem buffers); act_out is (act_ptr, probs_ptr, group_info, row, col), the tile's
    corner: its first gate column if GATE_UP_SPLIT, else its first column of h. The activation is that of h as rounded
    for the store, so that a separate kernel over the stored h gives the same bits.
    """
    _, h_ptr, bias_ptr, buffers = out
    act_ptr, probs_ptr, group_info, row, col = act_out
    _, start, size, N = group_info
    GATE_UP_SPLIT: gl.constexpr = ACT != "srelu" and not INTERLEAVED
    dtype: gl.constexpr = buffers.dtype
    SUBTILES_M: gl.constexpr = acc.shape[0] // SUBTILE
    SUBTILES_N: gl.constexpr = acc.shape[1] // SUBTILE // (2 if GATE_UP_SPLIT else 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    # of act where gate and up alternate: half as many columns as h
    act_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    subtile_rows = row + gl.arange(0, SUBTILE, layout=gl.SliceLayout(1, layout))
    subtile_cols = col + gl.arange(0, SUBTILE, layout=gl.SliceLayout(0, layout))[None, :]
    col_slices = split_columns(acc, SUBTILE)
    subtiles = reinterpret(
        buffers, dtype, [buffers.shape[0] * SUBTILES_M, SUBTILE, SUBTILE], buffers.layout
    )
    for sub_n in gl.static_range(SUBTILES_N):
        scale = load_row_scale(probs_ptr, start, size, subtile_rows, HAS_PROBS)
        col0 = col + sub_n * SUBTILE
        buffers.index(0).store(
            add_bias(col_slices[sub_n], bias_ptr, group_info, col0, HAS_BIAS).to(dtype)
        )
        if GATE_UP_SPLIT:
            up_slice = add_bias(
                col_slices[SUBTILES_N + sub_n], bias_ptr, group_info, N // 2 + col0, HAS_BIAS
            )
            buffers.index(1).store(up_slice.to(dtype))
        cols = subtile_cols + sub_n * SUBTILE
        for sub_m in range(SUBTILES_M):
            rows = subtile_rows + sub_m * SUBTILE
            next_scale = load_row_scale(probs_ptr, start, size, rows + SUBTILE, HAS_PROBS)
            h = subtiles.index(sub_m).load(layout)
            row_id, mask = (start + rows).to(gl.int64)[:, None], (rows < size)[:, None]
            if not GATE_UP_SPLIT:  # the last tile may extend beyond N
                mask = mask & (cols < N)
            if NEED_H:
                gl.store(h_ptr + row_id * N + cols, h, mask=mask)
            if GATE_UP_SPLIT:
                up = subtiles.index(SUBTILES_M + sub_m).load(layout)
                if NEED_H:
                    gl.store(h_ptr + row_id * N + N // 2 + cols, up, mask=mask)
                act = gated_act(h.to(gl.float32), up.to(gl.float32), ACT, ALPHA, LIMIT, OFFSET)
                act *= scale[:, None]
                gl.store(act_ptr + row_id * (N // 2) + cols, act.to(dtype), mask=mask)
            elif INTERLEAVED:
                gate, up = h.to(gl.float32).reshape((SUBTILE, SUBTILE // 2, 2)).split()
                act = gl.convert_layout(gated_act(gate, up, ACT, ALPHA, LIMIT, OFFSET), act_layout)
                act *= gl.convert_layout(scale, gl.SliceLayout(1, act_layout))[:, None]
                act_rows = (
                    row
                    + sub_m * SUBTILE
                    + gl.arange(0, SUBTILE, layout=gl.SliceLayout(1, act_layout))
                )
                act_cols = gl.arange(0, SUBTILE // 2, layout=gl.SliceLayout(0, act_layout))
                act_cols = (col0 // 2 + act_cols)[None, :]
                act_ptrs = act_ptr + (start + act_rows).to(gl.int64)[:, None] * (N // 2) + act_cols
                gl.store(
                    act_ptrs, act.to(dtype), mask=(act_rows < size)[:, None] & (act_cols < N // 2)
                )
            else:
                act = squared_relu(h.to(gl.float32)) * scale[:, None]
                gl.store(act_ptr + row_id * N + cols, act.to(dtype), mask=mask)
            scale = next_scale
