"""The end of a tile of the gradient of SwiGLU's output: gradients of gate and up, the activation and the
row sums of dprobs, while the other consumer multiplies.

h comes in parts of 64 rows, by TMA: the first ones beside the tile's products, each later one into the
place of one that is done with. The gradients leave from where gate and up came to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

PART_ROWS = gl.constexpr(64)


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
def parts_of(acc, COLUMNS: gl.constexpr):
    """A tuple of tiles of 64 rows and so many columns, row by row."""
    if acc.shape[0] > PART_ROWS:
        upper, lower = row_halves(acc)
        parts = parts_of(upper, COLUMNS) + parts_of(lower, COLUMNS)
    elif acc.shape[1] > COLUMNS:
        left, right = column_halves(acc)
        parts = parts_of(left, COLUMNS) + parts_of(right, COLUMNS)
    else:
        parts = (acc,)
    return parts


@gluon.jit
def ask(hidden, place, row, col, WIDTH: gl.constexpr, NUMBER: gl.constexpr):
    """Gate and up of this part of a tile of WIDTH columns, into the slot that is its turn."""
    h, slots, arrived = hidden
    _, start, _, N = place
    COLUMNS: gl.constexpr = h.block_type.shape[1]
    slot: gl.constexpr = NUMBER % (slots.shape[0] // 2)
    row += start + NUMBER // (WIDTH // COLUMNS) * PART_ROWS
    col += NUMBER % (WIDTH // COLUMNS) * COLUMNS
    here, gate, up = arrived.index(slot), slots.index(2 * slot), slots.index(2 * slot + 1)
    mbarrier.expect(here, 2 * h.block_type.nbytes)
    tma.async_copy_global_to_shared(h, [row, col], here, gate)
    tma.async_copy_global_to_shared(h, [row, N + col], here, up)


@gluon.jit
def scatter(y_ptr, buffer, rows_end, first, col, stride):
    """Rows of a ragged part, from the same buffer by pointers."""
    ROWS: gl.constexpr = buffer.shape[0]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (buffer.shape[1] // 8), buffer.shape[1] // 8], [4, 1], [1, 0]
    )
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, layout))
    to = y_ptr + rows.to(gl.int64)[:, None] * stride + cols[None, :]
    gl.store(to, buffer.load(layout), mask=(rows < rows_end)[:, None] & (cols[None, :] >= 0))


@gluon.jit
def swiglu_back(
    acc, hidden, grads, acts, act_buffer, probs_ptr, sums_ptr, place, row, col,
    HAS_PROBS: gl.constexpr,
):  # fmt: skip
    """Gradients and activation of a tile. A slot is used an even number of times: its phases repeat."""
    h, slots, arrived = hidden
    dh, dh_ptr = grads
    a, a_ptr = acts
    _, start, size, N = place
    SLOTS: gl.constexpr = slots.shape[0] // 2
    COLUMNS: gl.constexpr = h.block_type.shape[1]
    PER_ROW: gl.constexpr = acc.shape[1] // COLUMNS
    PARTS: gl.constexpr = acc.shape[0] // PART_ROWS * PER_ROW
    gl.static_assert(PARTS % (2 * SLOTS) == 0)
    parts = parts_of(acc, COLUMNS)
    layout: gl.constexpr = parts[0].type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = row + gl.arange(0, PART_ROWS, layout=row_layout)
    dot = gl.zeros((PART_ROWS,), gl.float32, layout=row_layout)
    scale = gl.full((PART_ROWS,), 1.0, gl.float32, layout=row_layout)
    for i in gl.static_range(PARTS):
        part_row = row + i // PER_ROW * PART_ROWS
        part_col = col + i % PER_ROW * COLUMNS
        if HAS_PROBS and i % PER_ROW == 0:
            rows = part_row + gl.arange(0, PART_ROWS, layout=row_layout)
            scale = gl.load(probs_ptr + start + rows, mask=rows < size, other=0.0)
        gate_buffer, up_buffer = slots.index(i % SLOTS * 2), slots.index(i % SLOTS * 2 + 1)
        mbarrier.wait(arrived.index(i % SLOTS), i // SLOTS & 1)
        gate, up = gate_buffer.load(layout).to(gl.float32), up_buffer.load(layout).to(gl.float32)
        sigmoid = 1.0 / (1.0 + gl.exp(-gate))
        silu = gate * sigmoid
        act = silu * up
        da = parts[i].to(h.dtype).to(gl.float32)  # as it would be stored
        if HAS_PROBS:
            sums = gl.where(part_col < N, gl.sum(da * act, axis=1), 0.0)
            dot = sums if i % PER_ROW == 0 else dot + sums
        da *= scale[:, None]
        dgate = da * up * (sigmoid + silu * (1.0 - sigmoid))
        tma.store_wait(0)
        if i > 0 and i - 1 + SLOTS < PARTS:
            ask(hidden, place, row, col, PER_ROW * COLUMNS, i - 1 + SLOTS)
        gate_buffer.store(dgate.to(h.dtype))
        up_buffer.store((da * silu).to(h.dtype))
        act_buffer.store((act * scale[:, None]).to(h.dtype))
        fence_async_shared()
        first, end = start + part_row, start + size
        if part_col < N:
            if part_row + PART_ROWS <= size:
                tma.async_copy_shared_to_global(dh, [first, part_col], gate_buffer)
                tma.async_copy_shared_to_global(dh, [first, N + part_col], up_buffer)
                tma.async_copy_shared_to_global(a, [first, part_col], act_buffer)
            else:
                scatter(dh_ptr, gate_buffer, end, first, part_col, 2 * N)
                scatter(dh_ptr, up_buffer, end, first, N + part_col, 2 * N)
                scatter(a_ptr, act_buffer, end, first, part_col, N)
        if HAS_PROBS and i % PER_ROW == PER_ROW - 1:
            gl.store(sums_ptr + start + rows, dot, mask=rows < size)
    tma.store_wait(0)
