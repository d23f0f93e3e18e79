"""How the operands of an FP8 GEMM of Hopper come into rings of tiles in shared memory, and which tile is where.

One warp issues TMA for both operands, 128 numbers of each row a step, and for scales of vectors, which come with
their step. Rows of a tile beyond its group are the next group's: they reach no row that is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import load_tile
from .grouped_rings import Descriptor, swizzle

MAX_GROUPS = gl.constexpr(2048)
RAGGED_ROWS = gl.constexpr(1 << 30)
BLOCK = gl.constexpr(128)
CODES = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
VECTORS = gl.NVMMASharedLayout.get_default_for([1, 128], gl.float32)
# what the scales of an operand are of; those of rows that begin anywhere, where no TMA does (at 16 bytes), are read by
# the consumers
NONE, SQUARE, VECTOR, ROW_VECTOR = (gl.constexpr(i) for i in range(4))


class Codes(Descriptor):
    """A descriptor of tiles of codes."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = CODES


class Vectors(Descriptor):
    """A descriptor of the scales of vectors."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = VECTORS


def describe_codes(t, rows):
    """Codes (..., K) in tiles of so many rows."""
    width = t.shape[-1]
    return Codes(t, (t.numel() // width, width), (width, 1), [rows, 128])


def describe_vectors(t, rows):
    """Scales (ceil(K / 128), R) of vectors, so many rows at once."""
    return Vectors(t, t.shape, t.stride(), [1, rows])


def describe_rows(t):
    """Rows (R, N) that form groups, in parts of 64 x 64, of codes 64 x 128: see `ragged`."""
    stride = t.stride(0)
    shape, strides = (
        [0x7FFF0000, 0x7FFF0000, 1 << 30, t.shape[1]],
        [2**34 - stride, stride, stride, 1],
    )
    if t.itemsize == 1:
        return Codes(t, shape, strides, [1, 1, 64, 128])
    return Descriptor(t, shape, strides, [1, 1, 64, 64])


def describe_weight(t):
    """A weight (E, N, K) or (N, K) in parts of 64 x 64. It may be some rows, or some columns, of larger ones."""
    n, k = t.shape[-2:]
    strides = t.stride() if t.dim() == 3 else (n * k, *t.stride())
    return Descriptor(t, (t.numel() // (n * k), n, k), strides, [1, 64, 64])


@gluon.jit
def ragged(start, size, row, col):
    """As grouped_mm.ragged: what lies at or beyond `size` is not written."""
    return [RAGGED_ROWS, start + size, RAGGED_ROWS - size + row, col]


@gluon.jit
def entry_of(tile, problem, GROUPED: gl.constexpr):
    """The table's entry of a tile: asked for one tile ahead, so that nobody waits for it."""
    entries_ptr, _, total, each, _, _, _, _ = problem
    entry = gl.to_tensor(0)
    if GROUPED:
        entry = gl.load(entries_ptr + tile // each, mask=tile < total, other=0)
    return entry


@gluon.jit
def locate(
    tile, entry, problem,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, BLOCK_M: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """(group, its first row, its rows, row block, column block, first block of K, blocks of K) of a tile.

    The K of a weight gradient is the rows of a group, which begin at a block of their own.
    """
    _, offs_ptr, _, each, rows, blocks, num_m, num_n = problem
    group = entry % MAX_GROUPS
    start = gl.to_tensor(0)
    size = rows
    if GROUPED:
        start = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        size = gl.maximum(gl.minimum(gl.load(offs_ptr + group), rows) - start, 0)
    first = gl.to_tensor(0)
    steps = blocks
    if WGRAD:
        block_m, block_n = swizzle(tile % each, num_m, num_n, GROUP)
        first = start // BLOCK + group
        steps = gl.minimum((size + BLOCK - 1) // BLOCK, blocks - first)
    else:
        inside = tile
        if GROUPED:
            inside = (entry // MAX_GROUPS) * num_n + tile % num_n
        block_m, block_n = swizzle(inside, (size + BLOCK_M - 1) // BLOCK_M, num_n, GROUP)
    return group, start, size, block_m, block_n, first, steps


@gluon.jit
def load_tiles(
    a, b, a_scale, b_scale, N, problem, ring,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    _, _, total, _, _, _, _, _ = problem
    a_ring, b_ring, a_scales, b_scales, empty, ready = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    A_VECTORS: gl.constexpr = BLOCK_M * 4 if A_SCALE == VECTOR else 0
    B_VECTORS: gl.constexpr = BLOCK_N * 4 if B_SCALE == VECTOR else 0
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK + A_VECTORS + B_VECTORS
    step = gl.to_tensor(0)
    entry = entry_of(gl.program_id(0), problem, GROUPED)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = entry_of(tile + gl.num_programs(0), problem, GROUPED)
        at = locate(tile, entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
        group, start, _, block_m, block_n, first, steps = at
        row, col = block_m * BLOCK_M, block_n * BLOCK_N
        if not WGRAD:
            row += start
            col += group * N
        # not from `first` on: what only bounds of an inner loop depend on, Triton 3.6 takes for the same in all tiles
        for i in range(steps):
            k = first + i
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            if A_SCALE == VECTOR:
                load_tile(a_scale, [k, row], full, a_scales.index(slot))
            if B_SCALE == VECTOR:
                load_tile(b_scale, [k, col], full, b_scales.index(slot))
            load_tile(a, [row, k * BLOCK], full, a_ring.index(slot))
            load_tile(b, [col, k * BLOCK], full, b_ring.index(slot))
            step += 1
        entry = following
