"""The end of a tile of the gradient of an activation's output, of SwiGLU or of squared ReLU: the gradient of what it
was applied to, the activation and the row sums of dprobs, while the other consumer multiplies.

The tile goes to shared memory, so that what follows is one short loop over parts of a few rows: code that is
written out for every part of the accumulator does not fit the instruction cache, and takes ten times as long.
h comes in such parts by TMA, the first ones beside the tile's products, each later one into the place of one
that has been read. Stores are whole lines of 128 bytes, so that full and ragged tiles are one path.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import load_tile, reinterpret

WIDTH = gl.constexpr(64)  # columns of a part


@gluon.jit
def column_halves(acc):
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape((M, 2, N // 2)).permute((0, 2, 1)).split()


@gluon.jit
def row_halves(acc):
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape((2, M // 2, N)).permute((1, 2, 0)).split()


@gluon.jit
def blocks_of(acc):
    """A tuple of tiles of 64 by 64, row by row."""
    if acc.shape[0] > 64:
        upper, lower = row_halves(acc)
        blocks = blocks_of(upper) + blocks_of(lower)
    elif acc.shape[1] > 64:
        left, right = column_halves(acc)
        blocks = blocks_of(left) + blocks_of(right)
    else:
        blocks = (acc,)
    return blocks


@gluon.jit
def room_for(
    h, gates, sums_ptr, ACT: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_WIDTH: gl.constexpr
):
    """What a consumer needs besides the slots of gates, whose phases are set up: see `act_back`."""
    SLOTS: gl.constexpr = gates.shape[0]
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if ACT == "swiglu":
        ups = gl.allocate_shared_memory(h.dtype, gates.shape, h.layout)
    else:
        ups = gates
    staged = gl.allocate_shared_memory(h.dtype, [TILE_WIDTH // WIDTH, 64, WIDTH], h.layout)
    scales = gl.allocate_shared_memory(gl.float32, [TILE_ROWS], line)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(i), count=1)
    return sums_ptr, (h, gates, ups, arrived), staged, scales


@gluon.jit
def ask(hidden, place, row, col, number, ACT: gl.constexpr, ACROSS: gl.constexpr):
    """Gate and up of this part of a tile that is ACROSS parts wide, into the slot that is its turn."""
    GATED: gl.constexpr = ACT == "swiglu"
    h, gates, ups, arrived = hidden
    _, start, _, N = place
    slot = number % gates.shape[0]
    row += start + number // ACROSS * h.block_type.shape[0]
    col += number % ACROSS * WIDTH
    mbarrier.expect(arrived.index(slot), (2 if GATED else 1) * h.block_type.nbytes)
    load_tile(h, [row, col], arrived.index(slot), gates.index(slot))
    if GATED:
        load_tile(h, [row, N + col], arrived.index(slot), ups.index(slot))


@gluon.jit
def keep_scales(scales, probs_ptr, place, row):
    """The probabilities of a tile's rows, before its products: nobody waits for them later."""
    _, start, size, _ = place
    rows = row + gl.arange(0, scales.shape[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
    scales.store(gl.load(probs_ptr + start + rows, mask=rows < size, other=0.0))


@gluon.jit
def sigmoid(x):
    """In four instructions; without the care for results below 2^-126 it would be seventeen."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def act_back(
    acc, hidden, staged, scales, outs, sums_ptr, place, row, col,
    ACT: gl.constexpr, HAS_PROBS: gl.constexpr,
):  # fmt: skip
    """Gradients and activation of a tile, 64 rows after 64. A slot is used an even number of times: its
    phases repeat.
    """
    h, gates, ups, arrived = hidden
    dh_ptr, a_ptr = outs
    _, start, size, N = place
    SLOTS: gl.constexpr = gates.shape[0]
    ROWS: gl.constexpr = h.block_type.shape[0]
    ACROSS: gl.constexpr = staged.shape[0]
    EACH: gl.constexpr = 64 // ROWS  # parts of a block
    PARTS: gl.constexpr = acc.shape[0] // ROWS * ACROSS
    GATED: gl.constexpr = ACT == "swiglu"
    WIDTH_H = 2 * N if GATED else N
    gl.static_assert(PARTS % (2 * SLOTS) == 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    blocks = blocks_of(acc)
    parts = reinterpret(staged, h.dtype, [EACH * ACROSS, ROWS, WIDTH], h.layout)
    scales = reinterpret(scales, gl.float32, [acc.shape[0] // ROWS, ROWS], scales.layout)
    each = row + gl.arange(0, ROWS, layout=row_layout)
    across = col + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    dot = gl.zeros((ROWS,), gl.float32, layout=row_layout)
    for lower in gl.static_range(acc.shape[0] // 64):
        for i in gl.static_range(ACROSS):
            staged.index(i).store(blocks[lower * ACROSS + i].to(h.dtype))
        for i in range(lower * EACH * ACROSS, (lower + 1) * EACH * ACROSS):
            down, right, slot = i // ACROSS, i % ACROSS, i % SLOTS
            da = parts.index(right * EACH + down % EACH).load(layout).to(gl.float32)
            mbarrier.wait(arrived.index(slot), i // SLOTS & 1)
            gate = gates.index(slot).load(layout)
            up = ups.index(slot).load(layout) if GATED else gate
            if i + SLOTS < PARTS:
                ask(hidden, place, row, col, i + SLOTS, ACT, ACROSS)
            gate, up = gate.to(gl.float32), up.to(gl.float32)
            if GATED:
                slope = sigmoid(gate)
                silu = gate * slope
                act = silu * up
            else:
                positive = gl.where(gate <= 0.0, 0.0, gate)
                act = positive * positive
            rows, cols = each + down * ROWS, across + right * WIDTH
            if HAS_PROBS:
                sums = gl.sum(gl.where(cols < N, da * act, 0.0), axis=1)
                dot = gl.where(right == 0, sums, dot + sums)
                last = (rows < size) & (right == ACROSS - 1)
                gl.store(sums_ptr + start + rows, dot, mask=last)
                scale = scales.index(down).load(row_layout)[:, None]
                da *= scale
                act *= scale
            mask, at = (rows < size)[:, None] & (cols < N), (start + rows).to(gl.int64)[:, None]
            dh = dh_ptr + at * WIDTH_H + cols
            if GATED:
                dgate = da * up * (slope + silu * (1.0 - slope))
                gl.store(dh + N, (da * silu).to(h.dtype), mask=mask)
            else:
                dgate = da * 2.0 * positive
            gl.store(dh, dgate.to(h.dtype), mask=mask)
            gl.store(a_ptr + at * N + cols, act.to(h.dtype), mask=mask)
