"""Epilogue of the grouped input-gradient GEMM (`grouped_pingpong` with SLOTS) through SwiGLU or squared ReLU.

The accumulator is da, the gradient of the activation a = act(h) * probs. The epilogue loads the pre-activation h and
writes dh, a recomputed, and of each row what its columns add to dprobs, while the other consumer warpgroup runs its
mainloop.

The accumulator is staged in shared memory 64 rows at a time, so that what follows is one short loop over subtiles of
SUBTILE_M rows by SUBTILE_N columns: unrolled over the registers of the accumulator the code does not fit the
instruction cache, and takes ten times as long. h arrives in such subtiles by TMA, through a ring of SLOTS of the
consumer's own (`h_ring`): the first ones are prefetched before the mainloop, each later one into the slot that has just
been read. No empty barrier guards a slot, since the warpgroup that reads it also refills it. Stores are whole lines of
128 bytes by pointers, so that full and ragged tiles are one path.

Tuples: `h_ring` is (h_desc, gate_ring, up_ring, full_bars), where up_ring is gate_ring if h has no up columns;
`group_info` is (group, start, size, N), its first row, its rows and the columns of a.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_gemm import split_columns
from .gluon_names import load_tile, reinterpret

SUBTILE_N = gl.constexpr(64)  # columns of a subtile: a line of 128 bytes


@gluon.jit
def row_halves(acc):
    """Split (M, N) in registers into its upper and its lower (M / 2, N)."""
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape((2, M // 2, N)).permute((1, 2, 0)).split()


@gluon.jit
def split_64x64(acc):
    """Split the accumulator into a tuple of 64 x 64 tiles, row-major."""
    if acc.shape[0] > 64:
        upper, lower = row_halves(acc)
        blocks = split_64x64(upper) + split_64x64(lower)
    else:
        blocks = split_columns(acc, 64)
    return blocks


@gluon.jit
def alloc_act_bwd(
    h_desc, gate_ring, dprobs_ptr, ACT: gl.constexpr, WG_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Allocate the shared memory of one consumer's epilogue beside its gate_ring, and initialise the ring's full
    barriers.

    Returns what `act_bwd_epilogue` takes: (dprobs_ptr, h_ring, acc_smem (BLOCK_N / 64, 64, 64) of the input's dtype,
    row_scales (WG_M,) float32).
    """
    SLOTS: gl.constexpr = gate_ring.shape[0]
    layout_1d: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if ACT == "swiglu":
        up_ring = gl.allocate_shared_memory(h_desc.dtype, gate_ring.shape, h_desc.layout)
    else:
        up_ring = gate_ring
    acc_smem = gl.allocate_shared_memory(
        h_desc.dtype, [BLOCK_N // SUBTILE_N, 64, SUBTILE_N], h_desc.layout
    )
    row_scales = gl.allocate_shared_memory(gl.float32, [WG_M], layout_1d)
    full_bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full_bars.index(i), count=1)
    return dprobs_ptr, (h_desc, gate_ring, up_ring, full_bars), acc_smem, row_scales


@gluon.jit
def prefetch_h(h_ring, group_info, row, col, index, ACT: gl.constexpr, SUBTILES_N: gl.constexpr):
    """Issue TMA of the h of a subtile, gate and up if ACT is gated, into its slot of the ring.

    index counts the subtiles of the tile row-major, SUBTILES_N of them side by side; (row, col) is the tile's corner.
    """
    GATED: gl.constexpr = ACT == "swiglu"
    h_desc, gate_ring, up_ring, full_bars = h_ring
    _, start, _, N = group_info
    slot = index % gate_ring.shape[0]
    row += start + index // SUBTILES_N * h_desc.block_type.shape[0]
    col += index % SUBTILES_N * SUBTILE_N
    mbarrier.expect(full_bars.index(slot), (2 if GATED else 1) * h_desc.block_type.nbytes)
    load_tile(h_desc, [row, col], full_bars.index(slot), gate_ring.index(slot))
    if GATED:
        load_tile(h_desc, [row, N + col], full_bars.index(slot), up_ring.index(slot))


@gluon.jit
def stage_row_scales(row_scales, probs_ptr, group_info, row):
    """Load the probs of the tile's rows into shared memory before the mainloop, which hides the latency."""
    _, start, size, _ = group_info
    rows = row + gl.arange(0, row_scales.shape[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
    row_scales.store(gl.load(probs_ptr + start + rows, mask=rows < size, other=0.0))


@gluon.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) in four instructions of PTX; with denormal results it would take seventeen."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
        " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def act_bwd_epilogue(
    acc, h_ring, acc_smem, row_scales, out_ptrs, dprobs_ptr, group_info, row, col,
    ACT: gl.constexpr, HAS_PROBS: gl.constexpr,
):  # fmt: skip
    """Write dh and act of a tile from its accumulator da, and for dprobs its row sums of da * act(h), 64 rows after 64.

    Each slot of h_ring is filled an even number of times a tile, so that the phases are the same for every tile, and
    the consumer keeps no phase between tiles.
    """
    h_desc, gate_ring, up_ring, full_bars = h_ring
    dh_ptr, act_ptr = out_ptrs
    _, start, size, N = group_info
    SLOTS: gl.constexpr = gate_ring.shape[0]
    SUBTILE_M: gl.constexpr = h_desc.block_type.shape[0]
    SUBTILES_N: gl.constexpr = acc_smem.shape[0]
    SUBTILES_M: gl.constexpr = 64 // SUBTILE_M  # of the 64 rows that are staged
    NUM_SUBTILES: gl.constexpr = acc.shape[0] // SUBTILE_M * SUBTILES_N
    GATED: gl.constexpr = ACT == "swiglu"
    H_N = 2 * N if GATED else N
    gl.static_assert(NUM_SUBTILES % (2 * SLOTS) == 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    blocks = split_64x64(acc)
    da_subtiles = reinterpret(
        acc_smem, h_desc.dtype, [SUBTILES_M * SUBTILES_N, SUBTILE_M, SUBTILE_N], h_desc.layout
    )
    row_scales = reinterpret(
        row_scales, gl.float32, [acc.shape[0] // SUBTILE_M, SUBTILE_M], row_scales.layout
    )
    subtile_rows = row + gl.arange(0, SUBTILE_M, layout=row_layout)
    subtile_cols = col + gl.arange(0, SUBTILE_N, layout=gl.SliceLayout(0, layout))[None, :]
    dprobs = gl.zeros((SUBTILE_M,), gl.float32, layout=row_layout)
    for block_m in gl.static_range(acc.shape[0] // 64):
        for i in gl.static_range(SUBTILES_N):
            acc_smem.index(i).store(blocks[block_m * SUBTILES_N + i].to(h_desc.dtype))
        for i in range(block_m * SUBTILES_M * SUBTILES_N, (block_m + 1) * SUBTILES_M * SUBTILES_N):
            sub_m, sub_n, slot = i // SUBTILES_N, i % SUBTILES_N, i % SLOTS
            da = (
                da_subtiles.index(sub_n * SUBTILES_M + sub_m % SUBTILES_M)
                .load(layout)
                .to(gl.float32)
            )
            mbarrier.wait(full_bars.index(slot), i // SLOTS & 1)
            gate = gate_ring.index(slot).load(layout)
            up = up_ring.index(slot).load(layout) if GATED else gate
            if i + SLOTS < NUM_SUBTILES:
                prefetch_h(h_ring, group_info, row, col, i + SLOTS, ACT, SUBTILES_N)
            gate, up = gate.to(gl.float32), up.to(gl.float32)
            if GATED:
                sig = sigmoid(gate)
                silu = gate * sig
                act = silu * up
            else:
                relu = gl.where(gate <= 0.0, 0.0, gate)
                act = relu * relu
            rows, cols = subtile_rows + sub_m * SUBTILE_M, subtile_cols + sub_n * SUBTILE_N
            if HAS_PROBS:
                partial_dprobs = gl.sum(gl.where(cols < N, da * act, 0.0), axis=1)
                dprobs = gl.where(sub_n == 0, partial_dprobs, dprobs + partial_dprobs)
                store_mask = (rows < size) & (sub_n == SUBTILES_N - 1)
                gl.store(dprobs_ptr + start + rows, dprobs, mask=store_mask)
                row_scale = row_scales.index(sub_m).load(row_layout)[:, None]
                da *= row_scale
                act *= row_scale
            mask, row_id = (rows < size)[:, None] & (cols < N), (start + rows).to(gl.int64)[:, None]
            dh_ptrs = dh_ptr + row_id * H_N + cols
            if GATED:
                dgate = da * up * (sig + silu * (1.0 - sig))
                gl.store(dh_ptrs + N, (da * silu).to(h_desc.dtype), mask=mask)
            else:
                dgate = da * 2.0 * relu
            gl.store(dh_ptrs, dgate.to(h_desc.dtype), mask=mask)
            gl.store(act_ptr + row_id * N + cols, act.to(h_desc.dtype), mask=mask)
