"""How the operands of a grouped GEMM of Hopper come into rings of tiles in shared memory.

One warp issues TMA for both operands. Rows given by index come by cp.async of four warps, LEAD steps
ahead of the weights, whose latency is shorter, and across the borders of tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MAX_GROUPS = gl.constexpr(2048)
SWIZZLED = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)


class Address:
    """All that a descriptor needs of its tensor, which it must not keep alive."""

    def __init__(self, t):
        self.dtype, self._address = t.dtype, t.data_ptr()

    def data_ptr(self):
        return self._address


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """A tensor descriptor of what the launcher knows to be describable: nothing is checked twice."""

    flat = None

    def __init__(self, t, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = (
            Address(t),
            shape,
            strides,
            block_shape,
        )
        self.layout, self.padding = SWIZZLED, "zero"


@gluon.jit
def locate(tile, problem, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):  # as grouped_mm_kernel does
    """(group, first row, rows, row block, column block) of a tile, of the last one beyond it."""
    entries_ptr, offs_ptr, total, R, _, _, num_n = problem
    tile = gl.maximum(gl.minimum(tile, total - 1), 0)
    entry = gl.load(entries_ptr + tile // num_n)
    group = entry % MAX_GROUPS
    start = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    size = gl.maximum(gl.minimum(gl.load(offs_ptr + group), R) - start, 0)
    inside = (entry // MAX_GROUPS) * num_n + tile % num_n
    band = inside // (GROUP * num_n)
    height = gl.maximum(gl.minimum((size + BLOCK_M - 1) // BLOCK_M - band * GROUP, GROUP), 1)
    place = inside - band * GROUP * num_n
    return group, start, size, band * GROUP + place % height, place // height


@gluon.jit
def load_weight(weight, tile, full, group, k, first, N, K, TRANSPOSED: gl.constexpr):
    """Columns `first` and on of the weight into a tile, in boxes."""
    if TRANSPOSED:
        PANEL: gl.constexpr = weight.block_type.shape[1]
        last = (gl.cdiv(N, PANEL) - 1) * PANEL  # again for what lies beyond N: zero fill is slow
        for i in gl.static_range(tile.shape[1] // PANEL):
            col = gl.minimum(first + i * PANEL, last)
            panel = tile.slice(i * PANEL, PANEL, 1)
            tma.async_copy_global_to_shared(weight, [group * K + k, col], full, panel)
    else:
        BOX: gl.constexpr = weight.block_type.shape[0]
        for i in gl.static_range(tile.shape[0] // BOX):
            box = tile.slice(i * BOX, BOX, 0)
            tma.async_copy_global_to_shared(weight, [group * N + first + i * BOX, k], full, box)


@gluon.jit
def load_tiles(
    x, weight, problem, ring, BLOCK_N: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr
):
    x_ring, w_ring, tail_ring, _, _, empty, ready = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    _, _, total, _, N, K, _ = problem
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    MAIN: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    step = gl.to_tensor(0)
    group, start, _, block_m, block_n = locate(gl.program_id(0), problem, BLOCK_M, GROUP)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = locate(tile + gl.num_programs(0), problem, BLOCK_M, GROUP)
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, x.block_type.nbytes + W_BYTES)
            rows = [start + block_m * BLOCK_M, k]
            tma.async_copy_global_to_shared(x, rows, full, x_ring.index(slot))
            first = block_n * BLOCK_N
            load_weight(weight, w_ring.index(slot), full, group, k, first, N, K, TRANSPOSED)
            if MAIN < BLOCK_N:
                first += MAIN
                load_weight(weight, tail_ring.index(slot), full, group, k, first, N, K, TRANSPOSED)
            step += 1
        group, start, _, block_m, block_n = following


@gluon.jit
def indices(index_ptr, rows, start, size, block_m, BLOCK_M: gl.constexpr):
    at = block_m * BLOCK_M + rows
    return gl.load(index_ptr + start + at, mask=at < size, other=0).to(gl.int32)


@gluon.jit
def gather_tiles(
    x_ptr, index_ptr, stride_x, weight, problem, ring,
    BLOCK_N: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Rows of step s, then the weights of step s - LEAD; the indices of a tile are asked for one
    tile ahead.
    """
    _, _, total, _, N, K, _ = problem
    x_ring, w_ring, tail_ring, x_empty, x_ready, empty, ready = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    X_STAGES: gl.constexpr = x_ring.shape[0]
    LEAD: gl.constexpr = X_STAGES - STAGES
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    MAIN: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    tile = gl.program_id(0)
    all_steps = gl.cdiv(gl.maximum(total - tile, 0), gl.num_programs(0)) * (K // BLOCK_K)
    w_tile = tile
    group, start, size, block_m, block_n = locate(tile, problem, BLOCK_M, GROUP)
    index = indices(index_ptr, rows, start, size, block_m, BLOCK_M)
    tile += gl.num_programs(0)
    _, start, size, block_m, _ = locate(tile, problem, BLOCK_M, GROUP)
    following = indices(index_ptr, rows, start, size, block_m, BLOCK_M)
    k = gl.to_tensor(0)
    w_k = gl.to_tensor(0)
    for step in range(0, all_steps + LEAD):
        if step < all_steps:
            slot = step % X_STAGES
            pointers = x_ptr + index.to(gl.int64)[:, None] * stride_x + (k + cols)[None, :]
            mbarrier.wait(x_empty.index(slot), ((step // X_STAGES) & 1) ^ 1)
            async_copy.async_copy_global_to_shared(x_ring.index(slot), pointers)
            async_copy.mbarrier_arrive(x_ready.index(slot), increment_count=False)
            k += BLOCK_K
            if k == K:
                k = gl.to_tensor(0)
                index = following
                tile += gl.num_programs(0)
                _, start, size, block_m, _ = locate(tile, problem, BLOCK_M, GROUP)
                following = indices(index_ptr, rows, start, size, block_m, BLOCK_M)
        w_step = step - LEAD
        if w_step >= 0:
            slot = w_step % STAGES
            mbarrier.wait(empty.index(slot), ((w_step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, W_BYTES)
            first = block_n * BLOCK_N
            load_weight(weight, w_ring.index(slot), full, group, w_k, first, N, K, TRANSPOSED)
            if MAIN < BLOCK_N:
                first += MAIN
                load_weight(
                    weight, tail_ring.index(slot), full, group, w_k, first, N, K, TRANSPOSED
                )
            w_k += BLOCK_K
            if w_k == K:
                w_k = gl.to_tensor(0)
                w_tile += gl.num_programs(0)
                group, _, _, _, block_n = locate(w_tile, problem, BLOCK_M, GROUP)
