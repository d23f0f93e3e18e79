"""The end of a tile of a GEMM that goes on through an activation: SwiGLU, or squared ReLU.

The columns go through shared memory, 32 gates and what they gate at a time, and one short loop over rows
writes them and their activation: code that is written out for every part of the accumulator does not fit the
instruction cache. Parts of 64 took the room of the fifth stage of operands, without which products wait for
a tenth of their time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_names import reinterpret
from .grouped_dswiglu import column_halves, sigmoid

AT_ONCE = gl.constexpr(32)  # rows, and columns


@gluon.jit
def room_to_stage(dtype: gl.constexpr):
    """Of one consumer, for rows of gates and of what they gate."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, AT_ONCE], dtype)
    return gl.allocate_shared_memory(dtype, [2, 64, AT_ONCE], layout)


@gluon.jit
def columns_of(acc):
    """A tuple of AT_ONCE columns each, from left to right."""
    if acc.shape[1] > AT_ONCE:
        left, right = column_halves(acc)
        parts = columns_of(left) + columns_of(right)
    else:
        parts = (acc,)
    return parts


@gluon.jit
def row_scale(probs_ptr, start, size, rows, HAS_PROBS: gl.constexpr):
    """probs of rows of a group, or ones."""
    if HAS_PROBS:
        scale = gl.load(probs_ptr + start + rows, mask=rows < size, other=0.0)
    else:
        scale = gl.full(rows.shape, 1.0, gl.float32, layout=rows.type.layout)
    return scale


@gluon.jit
def squared_relu(x):
    """NaN passes through, as in torch."""
    positive = gl.where(x <= 0.0, 0.0, x)
    return positive * positive


@gluon.jit
def store_act(
    acc, staged, h_ptr, to, ACT: gl.constexpr, HAS_PROBS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """acc: of SwiGLU gates and as many columns that they gate; to: where the activation goes, and of which rows and
    columns from which on. It is of what is stored of acc, so that a pass over that would give the same.
    """
    act_ptr, probs_ptr, place, row, col = to
    _, start, size, N = place
    GATED: gl.constexpr = ACT == "swiglu"
    WIDTH = N // 2 if GATED else N
    dtype: gl.constexpr = staged.dtype
    PARTS: gl.constexpr = acc.shape[0] // AT_ONCE
    SIDES: gl.constexpr = acc.shape[1] // AT_ONCE // (2 if GATED else 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    each = row + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    across = col + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, layout))[None, :]
    columns = columns_of(acc)
    parts = reinterpret(staged, dtype, [2 * PARTS, AT_ONCE, AT_ONCE], staged.layout)
    for side in gl.static_range(SIDES):
        scale = row_scale(probs_ptr, start, size, each, HAS_PROBS)
        staged.index(0).store(columns[side].to(dtype))
        if GATED:
            staged.index(1).store(columns[SIDES + side].to(dtype))
        cols = across + side * AT_ONCE
        for i in range(PARTS):
            rows = each + i * AT_ONCE
            following = row_scale(probs_ptr, start, size, rows + AT_ONCE, HAS_PROBS)
            gate = parts.index(i).load(layout)
            at, mask = (start + rows).to(gl.int64)[:, None], (rows < size)[:, None]
            if not GATED:  # the last tile may lie beyond N
                mask = mask & (cols < N)
            if KEEPS:
                gl.store(h_ptr + at * N + cols, gate, mask=mask)
            if GATED:
                up = parts.index(PARTS + i).load(layout)
                if KEEPS:
                    gl.store(h_ptr + at * N + N // 2 + cols, up, mask=mask)
                gate = gate.to(gl.float32)
                act = gate * sigmoid(gate) * up.to(gl.float32)
            else:
                act = squared_relu(gate.to(gl.float32))
            act *= scale[:, None]
            gl.store(act_ptr + at * WIDTH + cols, act.to(dtype), mask=mask)
            scale = following
