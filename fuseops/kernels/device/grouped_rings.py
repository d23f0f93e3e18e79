"""How the operands of a grouped GEMM of Hopper come into rings of tiles in shared memory.

One warp issues TMA for both operands, or four warps cp.async for the rows given by index and TMA for
the weights. A slot is `ready` when both have come and `empty` when the consumers have read it.

Small tiles read more than the L2 cache gives; they live on neighbouring programs that run in step and ask
for the same tiles, which the GPU joins on the way. So programs begin together, in the GPU's own order:
programmatic dependent launch lost up to a quarter, clusters and other orders as much. Slower too:
two warps for the rows beside one for the weights, which lets the two run apart, by 1 to 5 %. Wide tiles of
long products run apart, and read twice as much from memory; a counter that held the programs together
mended that, and then they took as long as small ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import grouped_mm
from .gluon_names import load_rows, load_tile

MAX_GROUPS = gl.constexpr(2048)
swizzle = gluon.jit(grouped_mm.swizzle.fn)  # one order of tiles for both languages
SWIZZLED = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)


class Address:
    """All that a descriptor needs of its tensor, which it must not keep alive."""

    def __init__(self, t):
        self.dtype, self._address = t.dtype, t.data_ptr()
        self.rehearsed = t if t.is_meta else None  # it has no memory to keep alive

    def data_ptr(self):
        return self._address


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """A tensor descriptor of what the launcher knows to be describable: nothing is checked twice."""

    one_layout = True  # of all of its class

    def __init__(self, t, shape, strides, block_shape):
        self.base, self.shape = Address(t), shape
        self.strides, self.block_shape = strides, block_shape
        self.layout, self.padding = SWIZZLED, "zero"


@gluon.jit
def entry_of(tile, problem):
    """The table's entry of a tile: asked for one tile ahead, so that nobody waits for it."""
    entries_ptr, _, total, _, _, _, num_n = problem
    return gl.load(entries_ptr + tile // num_n, mask=tile < total, other=0)


@gluon.jit
def locate(tile, entry, problem, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):
    """(group, first row, rows, row block, column block) of a tile, as in grouped_mm_kernel."""
    _, offs_ptr, _, R, _, _, num_n = problem
    group = entry % MAX_GROUPS
    start = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    size = gl.maximum(gl.minimum(gl.load(offs_ptr + group), R) - start, 0)
    inside = (entry // MAX_GROUPS) * num_n + tile % num_n
    block_m, block_n = swizzle(inside, (size + BLOCK_M - 1) // BLOCK_M, num_n, GROUP)
    return group, start, size, block_m, block_n


@gluon.jit
def load_weight(
    weight, tile, full, group, k, block_n, N, K, TRANSPOSED: gl.constexpr, HALVES: gl.constexpr
):
    """HALVES: half a tile of gates, and half a tile of what they gate, N / 2 rows below."""
    if HALVES:
        HALF: gl.constexpr = tile.shape[0] // 2
        row = group * N + block_n * HALF
        load_tile(weight, [row, k], full, tile.slice(0, HALF, 0))
        load_tile(weight, [row + N // 2, k], full, tile.slice(HALF, HALF, 0))
    elif TRANSPOSED:
        PANEL: gl.constexpr = weight.block_type.shape[1]
        BLOCK_N: gl.constexpr = tile.shape[1]
        last = (gl.cdiv(N, PANEL) - 1) * PANEL  # again for what lies beyond N: zero fill is slow
        for i in gl.static_range(BLOCK_N // PANEL):
            col = gl.minimum(block_n * BLOCK_N + i * PANEL, last)
            panel = tile.slice(i * PANEL, PANEL, 1)
            load_tile(weight, [group * K + k, col], full, panel)
    else:
        at = [group * N + block_n * tile.shape[0], k]
        load_tile(weight, at, full, tile)


@gluon.jit
def load_boxes(x, row, size, k, full, tile, OTHERS: gl.constexpr):
    """A tile of rows, of which boxes that begin beyond the group's `size` are left out: their rows of the product are
    never stored. `full` waits for what is loaded and OTHERS bytes.
    """
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = x.block_type.nbytes
    if tile.shape[0] == ROWS:
        mbarrier.expect(full, BYTES + OTHERS)
        load_tile(x, [row, k], full, tile)
    else:
        boxes = gl.minimum((size + ROWS - 1) // ROWS, tile.shape[0] // ROWS)
        for i in gl.static_range(tile.shape[0] // ROWS):
            mbarrier.expect(full, (i + 1) * BYTES + OTHERS, pred=boxes == i + 1)
        for i in gl.static_range(tile.shape[0] // ROWS):
            box = tile.slice(i * ROWS, ROWS, 0)
            load_tile(x, [row + i * ROWS, k], full, box, pred=i < boxes)


@gluon.jit
def load_tiles(
    x, weight, problem, ring,
    TRANSPOSED: gl.constexpr, HALVES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    _, _, total, _, N, K, _ = problem
    x_ring, w_ring, empty, ready = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    W_BYTES: gl.constexpr = w_ring.shape[1] * w_ring.shape[2] * 2
    step = gl.to_tensor(0)
    entry = entry_of(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = entry_of(tile + gl.num_programs(0), problem)
        group, start, size, block_m, block_n = locate(tile, entry, problem, BLOCK_M, GROUP)
        row = block_m * BLOCK_M
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            load_boxes(x, start + row, size - row, k, full, x_ring.index(slot), W_BYTES)
            tile_w = w_ring.index(slot)
            load_weight(weight, tile_w, full, group, k, block_n, N, K, TRANSPOSED, HALVES)
            step += 1
        entry = following


@gluon.jit
def indices(index_ptr, rows, start, size, block_m, BLOCK_M: gl.constexpr):
    at = block_m * BLOCK_M + rows
    return gl.load(index_ptr + start + at, mask=at < size, other=0).to(gl.int32)


@gluon.jit
def gather_tiles(
    x_ptr, index_ptr, stride_x, weight, problem, ring,
    TRANSPOSED: gl.constexpr, HALVES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Rows first, whose latency is longer; the indices of a tile are asked for one tile ahead."""
    _, _, total, _, N, K, _ = problem
    x_ring, w_ring, empty, ready = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    W_BYTES: gl.constexpr = w_ring.shape[1] * w_ring.shape[2] * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    step = gl.to_tensor(0)
    first, entry = gl.program_id(0), entry_of(gl.program_id(0), problem)
    group, start, size, block_m, block_n = locate(first, entry, problem, BLOCK_M, GROUP)
    index = indices(index_ptr, rows, start, size, block_m, BLOCK_M)
    entry = entry_of(first + gl.num_programs(0), problem)
    for tile in range(first, total, gl.num_programs(0)):
        following = tile + gl.num_programs(0)
        next_group, start, size, block_m, next_n = locate(following, entry, problem, BLOCK_M, GROUP)
        next_index = indices(index_ptr, rows, start, size, block_m, BLOCK_M)
        entry = entry_of(following + gl.num_programs(0), problem)
        for k in range(0, K, BLOCK_K):
            pointers = x_ptr + index.to(gl.int64)[:, None] * stride_x + (k + cols)[None, :]
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            load_rows(x_ring.index(slot), pointers)
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.expect(full, W_BYTES)
            tile_w = w_ring.index(slot)
            load_weight(weight, tile_w, full, group, k, block_n, N, K, TRANSPOSED, HALVES)
            step += 1
        group, block_n, index = next_group, next_n, next_index
