"""The end of a tile of the gradient of SwiGLU's output: the gradients of gate and up, the activation and the
row sums of dprobs, while the other consumer multiplies.

The tile goes to shared memory first, so that what follows is one short loop over parts of a few rows: code that
is written out for every part of the accumulator does not fit the instruction cache, and takes ten times as long.
h comes in such parts by TMA, the first ones beside the tile's products, each later one into the place of one
that is done with; the results leave from where their operands lay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
def ask(hidden, place, row, col, number, ACROSS: gl.constexpr):
    """Gate and up of this part of a tile that is ACROSS parts wide, into the slot that is its turn."""
    h, slots, arrived = hidden
    _, start, _, N = place
    slot = number % (slots.shape[0] // 2)
    row += start + number // ACROSS * h.block_type.shape[0]
    col += number % ACROSS * WIDTH
    here = arrived.index(slot)
    mbarrier.expect(here, 2 * h.block_type.nbytes)
    tma.async_copy_global_to_shared(h, [row, col], here, slots.index(2 * slot))
    tma.async_copy_global_to_shared(h, [row, N + col], here, slots.index(2 * slot + 1))


@gluon.jit
def sigmoid(x):
    """In four instructions; without the care for results below 2^-126 it would be seventeen."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def swiglu_back(
    acc, hidden, tile, outs, probs_ptr, sums_ptr, place, row, col, HAS_PROBS: gl.constexpr
):
    """Gradients and activation of a tile. A slot is used an even number of times: its phases repeat."""
    h, slots, arrived = hidden
    dh, dh_ptr, a, a_ptr = outs
    _, start, size, N = place
    SLOTS: gl.constexpr = slots.shape[0] // 2
    ROWS: gl.constexpr = h.block_type.shape[0]
    ACROSS: gl.constexpr = acc.shape[1] // WIDTH
    PARTS: gl.constexpr = acc.shape[0] // ROWS * ACROSS
    EACH: gl.constexpr = 64 // ROWS  # parts of a block
    gl.static_assert(PARTS % (2 * SLOTS) == 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    blocks = blocks_of(acc)
    for i in gl.static_range(PARTS // EACH):
        tile.index(i).store(blocks[i].to(h.dtype))
    parts = tile._reinterpret(h.dtype, [PARTS, ROWS, WIDTH], h.layout)
    each, across = (
        gl.arange(0, ROWS, layout=row_layout),
        gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)),
    )
    dot = gl.zeros((ROWS,), gl.float32, layout=row_layout)
    for i in range(PARTS):
        down, right = i // ACROSS, i % ACROSS
        first, part_col = row + down * ROWS, col + right * WIDTH
        inside = first + each < size
        if HAS_PROBS:
            scale = gl.load(probs_ptr + start + first + each, mask=inside, other=0.0)[:, None]
        slot = i % SLOTS
        gate_buffer, up_buffer = slots.index(2 * slot), slots.index(2 * slot + 1)
        buffer = parts.index((down // EACH * ACROSS + right) * EACH + down % EACH)
        da = buffer.load(layout).to(gl.float32)
        mbarrier.wait(arrived.index(slot), i // SLOTS & 1)
        gate, up = gate_buffer.load(layout).to(gl.float32), up_buffer.load(layout).to(gl.float32)
        slope = sigmoid(gate)
        silu = gate * slope
        act = silu * up
        if HAS_PROBS:
            sums = gl.where(part_col < N, gl.sum(da * act, axis=1), 0.0)
            dot = gl.where(right == 0, sums, dot + sums)
            gl.store(sums_ptr + start + first + each, dot, mask=inside & (right == ACROSS - 1))
            da *= scale
            act *= scale
        gate_buffer.store((da * up * (slope + silu * (1.0 - slope))).to(h.dtype))
        up_buffer.store((da * silu).to(h.dtype))
        buffer.store(act.to(h.dtype))
        fence_async_shared()
        if (first + ROWS <= size) & (part_col < N):
            tma.async_copy_shared_to_global(dh, [start + first, part_col], gate_buffer)
            tma.async_copy_shared_to_global(dh, [start + first, N + part_col], up_buffer)
            tma.async_copy_shared_to_global(a, [start + first, part_col], buffer)
        else:
            rows = (start + first + each).to(gl.int64)[:, None]
            mask, cols = (
                inside[:, None] & (part_col + across < N)[None, :],
                (part_col + across)[None, :],
            )
            gl.store(dh_ptr + rows * (2 * N) + cols, gate_buffer.load(layout), mask=mask)
            gl.store(dh_ptr + rows * (2 * N) + N + cols, up_buffer.load(layout), mask=mask)
            gl.store(a_ptr + rows * N + cols, buffer.load(layout), mask=mask)
            tma.store_wait(0)
        tma.store_wait(3)  # of the part before, whose slot may be filled again
        if (i > 0) & (i - 1 + SLOTS < PARTS):
            ask(hidden, place, row, col, i - 1 + SLOTS, ACROSS)
    tma.store_wait(0)
