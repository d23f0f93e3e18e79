"""The end of a tile of a GEMM that goes on through an activation: SwiGLU, plain or clamped, or squared ReLU.

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
def room_to_stage(dtype: gl.constexpr, SIDES: gl.constexpr, ROWS: gl.constexpr):
    """Of one consumer, for its rows of gates and of what they gate."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, AT_ONCE], dtype)
    return gl.allocate_shared_memory(dtype, [SIDES, ROWS, AT_ONCE], layout)


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
def gated(
    gate, up, ACT: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr
):
    """As in `act.py`."""
    if ACT == "swiglu":
        return gate * sigmoid(gate) * up
    else:
        gl.static_assert(ACT == "clamped_swiglu", "unknown activation")
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
        return gate * sigmoid(ALPHA * gate) * up


@gluon.jit
def with_bias(acc, bias_ptr, place, col, HAS_BIAS: gl.constexpr):
    """Columns of acc from col on, with the bias of the group."""
    if HAS_BIAS:
        group, _, _, N = place
        cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + group.to(gl.int64) * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def store_act(
    acc, out, to, HAS_BIAS: gl.constexpr, ACT: gl.constexpr, PAIRS: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, OFFSET: gl.constexpr, HAS_PROBS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """acc: of a gated activation gates and as many columns that they gate, or both in turn (PAIRS); to: where the
    activation goes, and of which rows and columns from which on. It is of what is stored of acc, so that a pass over
    that would give the same.
    """
    _, h_ptr, bias_ptr, staged = out
    act_ptr, probs_ptr, place, row, col = to
    _, start, size, N = place
    HALVES: gl.constexpr = ACT != "srelu" and not PAIRS
    dtype: gl.constexpr = staged.dtype
    PARTS: gl.constexpr = acc.shape[0] // AT_ONCE
    SIDES: gl.constexpr = acc.shape[1] // AT_ONCE // (2 if HALVES else 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])  # of a pair's results
    each = row + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
    across = col + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, layout))[None, :]
    columns = columns_of(acc)
    parts = reinterpret(staged, dtype, [staged.shape[0] * PARTS, AT_ONCE, AT_ONCE], staged.layout)
    for side in gl.static_range(SIDES):
        scale = row_scale(probs_ptr, start, size, each, HAS_PROBS)
        first = col + side * AT_ONCE
        staged.index(0).store(with_bias(columns[side], bias_ptr, place, first, HAS_BIAS).to(dtype))
        if HALVES:
            right = with_bias(columns[SIDES + side], bias_ptr, place, N // 2 + first, HAS_BIAS)
            staged.index(1).store(right.to(dtype))
        cols = across + side * AT_ONCE
        for i in range(PARTS):
            rows = each + i * AT_ONCE
            following = row_scale(probs_ptr, start, size, rows + AT_ONCE, HAS_PROBS)
            h = parts.index(i).load(layout)
            at, mask = (start + rows).to(gl.int64)[:, None], (rows < size)[:, None]
            if not HALVES:  # the last tile may lie beyond N
                mask = mask & (cols < N)
            if KEEPS:
                gl.store(h_ptr + at * N + cols, h, mask=mask)
            if HALVES:
                up = parts.index(PARTS + i).load(layout)
                if KEEPS:
                    gl.store(h_ptr + at * N + N // 2 + cols, up, mask=mask)
                act = gated(h.to(gl.float32), up.to(gl.float32), ACT, ALPHA, LIMIT, OFFSET)
                act *= scale[:, None]
                gl.store(act_ptr + at * (N // 2) + cols, act.to(dtype), mask=mask)
            elif PAIRS:
                gate, up = h.to(gl.float32).reshape((AT_ONCE, AT_ONCE // 2, 2)).split()
                act = gl.convert_layout(gated(gate, up, ACT, ALPHA, LIMIT, OFFSET), narrow)
                act *= gl.convert_layout(scale, gl.SliceLayout(1, narrow))[:, None]
                lines = row + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, narrow))
                half = gl.arange(0, AT_ONCE // 2, layout=gl.SliceLayout(0, narrow))
                half = (first // 2 + half)[None, :]
                where = act_ptr + (start + lines).to(gl.int64)[:, None] * (N // 2) + half
                gl.store(where, act.to(dtype), mask=(lines < size)[:, None] & (half < N // 2))
            else:
                act = squared_relu(h.to(gl.float32)) * scale[:, None]
                gl.store(act_ptr + at * N + cols, act.to(dtype), mask=mask)
            scale = following
