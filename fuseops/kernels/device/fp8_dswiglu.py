"""SwiGLU and its backward on Hopper in Gluon, quantized to FP8 operands in the same pass, each input read once.

Backward (`fp8_dswiglu_kernel`): a program walks over blocks of 128 tokens of one group and, in each, over blocks of 128
features. Such a tile is loaded in four subtiles of 32 tokens, interleaved as `fp8_turned` says, through a ring of
STAGES slots filled by cp.async: while one subtile is processed, the STAGES - 1 after it are in flight. Rows of codes of
dgate and dup are stored from registers. Codes of columns wait in shared memory for the whole tile, the largest of whose
scales they take; `store_transposed` then writes them. Scales of rows and dprobs are stored a tile at a time, too. The
activation, which the weight gradient of the second projection reads, is recomputed and stored as columns alone.

A prefetch beyond the last tile loads nothing but still commits a group, so that `wait_group` counts alike everywhere.

Forward (`fp8_swiglu_kernel`): a program has 16 or 32 tokens by 128 features, in slices of 8 tokens; it loads all slices
to registers before it computes the first.

Rows have a scale for 128 features of a token, a power of two; results are rounded to bf16 first, as without FP8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from . import operands
from .fp8_stores import power_of_two_scale
from .fp8_turned import (
    SUBTILE_ROWS,
    SUBTILES,
    TOKENS_LAYOUT,
    allocate_codes,
    split_four,
    store_token_values,
    store_transposed,
    subtile_tokens,
)
from .gluon_names import load_rows, thread_barrier

parts_beside = gluon.jit(operands.parts_beside.fn)
program_blocks = gluon.jit(operands.program_blocks.fn)

UNSWIZZLED_LAYOUT = gl.constexpr(
    gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
)
# of a slice of 8 tokens by 128 features
SLICE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SLICE_TOKENS_LAYOUT = gl.constexpr(gl.SliceLayout(1, SLICE_LAYOUT.value))
SLICE_FEATURES_LAYOUT = gl.constexpr(gl.SliceLayout(0, SLICE_LAYOUT.value))

ROUND_BF16_ASM = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
PACK_E4M3X4_ASM = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)


@gluon.jit
def ptx_unary(ASM: gl.constexpr, x):
    """Apply one PTX instruction to each element of x, float32."""
    return gl.inline_asm_elementwise(ASM, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def silu_slope(x):
    """Return (silu(x), its slope), by the approximate instructions for 2^x and 1 / x, subnormals flushed to zero."""
    exp_neg_x = ptx_unary("ex2.approx.ftz.f32 $0, $1;", x * -1.4426950408889634)
    sigmoid = ptx_unary("rcp.approx.ftz.f32 $0, $1;", 1.0 + exp_neg_x)
    y = x * sigmoid
    return y, sigmoid + y * (1.0 - sigmoid)


@gluon.jit
def scale_tokens(x):
    """Return (x, rounded to bf16, times the inverse scales, scales) of x (tokens, 128): a scale for e4m3 each token."""
    x = gl.inline_asm_elementwise(
        ROUND_BF16_ASM, "=r,=r,r,r", [x], gl.float32, is_pure=True, pack=2
    )
    amax = gl.maximum(gl.max(gl.abs(x), axis=1), 0.0)
    inv, scale = power_of_two_scale(amax, 8)
    return x * inv[:, None], scale


@gluon.jit
def quantize_tokens(x):
    """Return (codes (tokens, 32), four features to a 32-bit word; scales (tokens,)) of x (tokens, 128)."""
    x, scale = scale_tokens(x)
    lanes = split_four(x.reshape((x.shape[0], 32, 2, 2)))
    return gl.inline_asm_elementwise(
        PACK_E4M3X4_ASM, "=r,f,f,f,f", lanes, gl.uint32, is_pure=True, pack=1
    ), scale


@gluon.jit
def allocate_ring(h_ptr, STAGES: gl.constexpr):
    """Allocate the smem ring: in each slot the inputs of a subtile, and the scales and probs of its tokens."""
    h_dtype: gl.constexpr = h_ptr.dtype.element_ty
    da_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SUBTILE_ROWS, 128], UNSWIZZLED_LAYOUT)
    gate_ring = gl.allocate_shared_memory(h_dtype, [STAGES, SUBTILE_ROWS, 128], UNSWIZZLED_LAYOUT)
    up_ring = gl.allocate_shared_memory(h_dtype, [STAGES, SUBTILE_ROWS, 128], UNSWIZZLED_LAYOUT)
    gate_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, SUBTILE_ROWS], TOKENS_LAYOUT)
    up_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, SUBTILE_ROWS], TOKENS_LAYOUT)
    probs_ring = gl.allocate_shared_memory(gl.float32, [STAGES, SUBTILE_ROWS], TOKENS_LAYOUT)
    return da_ring, gate_ring, up_ring, gate_scale_ring, up_scale_ring, probs_ring


@gluon.jit
def subtile_offsets(layout: gl.constexpr, row, end, stride, valid):
    """Return (offsets of a subtile's elements from its first, mask) as (32, 128); `row` is its first token."""
    token = subtile_tokens(gl.SliceLayout(1, layout))[:, None]
    feature = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    return token * stride + feature, (row + token < end) & valid


@gluon.jit
def prefetch_subtile(inputs, ring, slot, row, end, n_block, valid, SCALED: gl.constexpr):
    """Issue the cp.async loads of a subtile, from token `row` on and of feature block `n_block`, into a ring slot.

    Commit them as one group, which is empty unless `valid`.
    """
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, R, N, stride_da, stride_h = inputs
    da_ring, gate_ring, up_ring, gate_scale_ring, up_scale_ring, probs_ring = ring
    WARPS: gl.constexpr = gl.num_warps()
    BF16_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    token = subtile_tokens(gl.BlockedLayout([1], [32], [WARPS], [0]))
    row_mask = (row + token < end) & valid
    offsets, mask = subtile_offsets(BF16_LAYOUT, row, end, stride_da, valid)
    da_tile = da_ptr + row.to(gl.int64) * stride_da + n_block * 128
    load_rows(da_ring.index(slot), da_tile + offsets, mask=mask)
    gate_tile = h_ptr + row.to(gl.int64) * stride_h + n_block * 128
    if h_ptr.dtype.element_ty == gl.float8e4nv:
        FP8_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        offsets, mask = subtile_offsets(FP8_LAYOUT, row, end, stride_h, valid)
        scale_tile = h_scale_ptr + n_block.to(gl.int64) * R + row
        load_rows(gate_scale_ring.index(slot), scale_tile + token, mask=row_mask)
        load_rows(
            up_scale_ring.index(slot),
            scale_tile + (N // 128).to(gl.int64) * R + token,
            mask=row_mask,
        )
    else:
        offsets, mask = subtile_offsets(BF16_LAYOUT, row, end, stride_h, valid)
    load_rows(gate_ring.index(slot), gate_tile + offsets, mask=mask)
    load_rows(up_ring.index(slot), gate_tile + N + offsets, mask=mask)
    if SCALED:
        load_rows(probs_ring.index(slot), probs_ptr + row + token, mask=row_mask)
    async_copy.commit_group()


@gluon.jit
def load_dequantized(slot, scales, layout: gl.constexpr):
    """Load the elements of a ring slot as float32; FP8 codes are multiplied by their scales, one a token."""
    values = slot.load(layout).to(gl.float32)
    if slot.dtype == gl.float8e4nv:
        values *= scales.load(gl.SliceLayout(1, layout))[:, None]
    return values


@gluon.jit
def process_subtile(
    ring, slot, buffers, row_ptr, row, end, n_block, N, subtile,
    SCALED: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Compute dgate, dup and the activation of a subtile, store rows to memory and all codes and scales to `buffers`.

    buffers: codes and scales of dgate, dup and the activation, from `allocate_codes`, and dprobs (subtiles, 32)
    A thread has 16 features of a token, so packing codes and storing them needs no exchange between threads.
    """
    da_ring, gate_ring, up_ring, gate_scale_ring, up_scale_ring, probs_ring = ring
    dgate_codes, dup_codes, act_codes, dprobs = buffers
    WARPS: gl.constexpr = gl.num_warps()
    COMPUTE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    da = da_ring.index(slot).load(COMPUTE_LAYOUT).to(gl.float32)
    gate = load_dequantized(gate_ring.index(slot), gate_scale_ring.index(slot), COMPUTE_LAYOUT)
    up = load_dequantized(up_ring.index(slot), up_scale_ring.index(slot), COMPUTE_LAYOUT)
    silu, dsilu = silu_slope(gate)
    y, dy = silu * up, da
    if SCALED:
        prob = probs_ring.index(slot).load(gl.SliceLayout(1, COMPUTE_LAYOUT))
        dprobs.index(subtile).store(gl.sum(da * y, axis=1))
        dy, y = da * prob[:, None], y * prob[:, None]
    dgate, dgate_scale = quantize_tokens(dy * dsilu * up)
    dup, dup_scale = quantize_tokens(dy * silu)
    dgate_codes[0].index(subtile).store(dgate)
    dup_codes[0].index(subtile).store(dup)
    dgate_codes[1].index(subtile).store(dgate_scale)
    dup_codes[1].index(subtile).store(dup_scale)
    if ACT:
        act, act_scale = quantize_tokens(y)
        act_codes[0].index(subtile).store(act)
        act_codes[1].index(subtile).store(act_scale)
    if ROW:
        base = row_ptr + row.to(gl.int64) * (2 * N) + n_block * 128
        base = base.to(gl.pointer_type(gl.uint32))
        token = subtile_tokens(gl.SliceLayout(1, STORE_LAYOUT))[:, None]
        offsets = (
            token * (N // 2) + gl.arange(0, 32, layout=gl.SliceLayout(0, STORE_LAYOUT))[None, :]
        )
        mask = row + token < end
        gl.store(
            base + offsets,
            gl.convert_layout(dgate, STORE_LAYOUT, assert_trivial=True),
            mask=mask,
        )
        gl.store(
            base + N // 4 + offsets,
            gl.convert_layout(dup, STORE_LAYOUT, assert_trivial=True),
            mask=mask,
        )


@gluon.jit(do_not_specialize=["R", "parts", "span", "beside"])
def fp8_dswiglu_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, parts, stride_da, stride_h, span, beside,
    SCALED: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, ACT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Quantize dgate and dup, as rows and columns, and the activation, as columns; store dprobs by feature blocks.

    A program has one of `parts` parts of a group's token blocks, and `span` feature blocks, n_stride apart: programs
    that run at the same time write neighbouring pieces of the columns, as do `beside` neighbouring parts of a group.
    """
    num_n = N // 128
    n_stride = (num_n + span - 1) // span
    first_n_block = gl.program_id(0) // beside % n_stride
    program = gl.program_id(0) // beside // n_stride * beside + gl.program_id(0) % beside
    begin_block, end_block, group_start, group_end, group_first_block, num_blocks = program_blocks(
        parts_beside(program, E, beside), offs_ptr, R, E, parts, GROUPS, 128
    )
    ring = allocate_ring(h_ptr, STAGES)
    dgate_codes, dup_codes, act_codes = allocate_codes(), allocate_codes(), allocate_codes()
    dprobs = gl.allocate_shared_memory(gl.float32, [SUBTILES, SUBTILE_ROWS], TOKENS_LAYOUT)
    buffers = dgate_codes, dup_codes, act_codes, dprobs
    inputs = da_ptr, h_ptr, h_scale_ptr, probs_ptr, R, N, stride_da, stride_h
    for block in range(begin_block, end_block):
        row0 = group_start + (block - group_first_block) * 128
        next_subtile, next_n_block = 0 * block, first_n_block
        for stage in gl.static_range(STAGES - 1):
            prefetch_subtile(
                inputs, ring, stage, row0 + 4 * next_subtile, group_end,
                next_n_block, next_n_block < num_n, SCALED,
            )  # fmt: skip
            next_subtile, next_n_block = advance_subtile(next_subtile, next_n_block, n_stride)
        slot = 0 * first_n_block
        for n_block in range(first_n_block, num_n, n_stride):
            for subtile in range(SUBTILES):
                async_copy.wait_group(STAGES - 2)
                thread_barrier()
                free_slot = gl.where(slot == 0, STAGES - 1, slot - 1)
                row = row0 + 4 * next_subtile
                prefetch_subtile(
                    inputs, ring, free_slot, row, group_end,
                    next_n_block, next_n_block < num_n, SCALED,
                )  # fmt: skip
                next_subtile, next_n_block = advance_subtile(next_subtile, next_n_block, n_stride)
                process_subtile(
                    ring, slot, buffers, row_ptr, row0 + 4 * subtile, group_end,
                    n_block, N, subtile, SCALED, ROW, ACT,
                )  # fmt: skip
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            thread_barrier()
            if ROW:
                store_token_values(dgate_codes[1], scale_ptr, n_block, R, row0, group_end)
                store_token_values(dup_codes[1], scale_ptr, num_n + n_block, R, row0, group_end)
            if SCALED:
                store_token_values(dprobs, partial_ptr, n_block, R, row0, group_end)
            if COL:
                store_transposed(
                    dgate_codes, col_ptr, square_ptr, 0 * first_n_block, block, num_blocks, n_block
                )
                store_transposed(dup_codes, col_ptr, square_ptr, N, block, num_blocks, n_block)
            if ACT:
                store_transposed(
                    act_codes, a_ptr, a_square_ptr, 0 * first_n_block, block, num_blocks, n_block
                )
        async_copy.wait_group(0)
        thread_barrier()


@gluon.jit
def advance_subtile(subtile, n_block, n_stride):
    """Return the (subtile, n_block) that follows: the prefetch runs on into the next tile."""
    last = subtile + 1 == SUBTILES
    return gl.where(last, 0, subtile + 1), gl.where(last, n_block + n_stride, n_block)


@gluon.jit
def load_slice(ptr, scale_ptr, offsets, token, mask, n_block, R):
    """Return (a slice of h or of its codes, as it lies in memory; the scales of codes)."""
    if ptr.dtype.element_ty == gl.float8e4nv:
        codes = gl.load(ptr.to(gl.pointer_type(gl.uint8)) + offsets, mask=mask[:, None], other=0)
        scale = gl.load(scale_ptr + n_block.to(gl.int64) * R + token, mask=mask, other=0.0)
        return codes, scale
    else:
        return gl.load(ptr + offsets, mask=mask[:, None], other=0.0), token.to(gl.float32)


@gluon.jit
def dequantize_slice(values, scale, ptr):
    """Convert what `load_slice` returns to float32."""
    if ptr.dtype.element_ty == gl.float8e4nv:
        return values.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale[:, None]
    else:
        return values.to(gl.float32)


@gluon.jit
def load_gate_up(inputs, row0, i: gl.constexpr, n_block, N, SCALED: gl.constexpr):
    """Load slice i, of 8 tokens, of gate and up, with their scales and the probs of the tokens."""
    h_ptr, h_scale_ptr, probs_ptr, R, stride_h = inputs
    token = row0 + 8 * i + gl.arange(0, 8, layout=SLICE_TOKENS_LAYOUT)
    mask = token < R
    offsets = (
        token.to(gl.int64)[:, None] * stride_h
        + n_block * 128
        + gl.arange(0, 128, layout=SLICE_FEATURES_LAYOUT)[None, :]
    )
    gate, gate_scale = load_slice(h_ptr, h_scale_ptr, offsets, token, mask, n_block, R)
    up, up_scale = load_slice(h_ptr, h_scale_ptr, offsets + N, token, mask, n_block + N // 128, R)
    probs = gate_scale
    if SCALED:
        probs = gl.load(probs_ptr + token, mask=mask, other=0.0)
    return gate, up, gate_scale, up_scale, probs


@gluon.jit
def store_swiglu(loaded, inputs, outs, row0, i: gl.constexpr, n_block, N, SCALED: gl.constexpr):
    """Compute SwiGLU of a loaded slice, times probs where SCALED, and store its codes and scales."""
    gate, up, gate_scale, up_scale, probs = loaded
    h_ptr, _, _, R, _ = inputs
    row_ptr, scale_ptr = outs
    silu, _ = silu_slope(dequantize_slice(gate, gate_scale, h_ptr))
    y = silu * dequantize_slice(up, up_scale, h_ptr)
    if SCALED:
        y *= probs[:, None]
    y, scale = scale_tokens(y)
    token = row0 + 8 * i + gl.arange(0, 8, layout=SLICE_TOKENS_LAYOUT)
    mask = token < R
    feature = n_block * 128 + gl.arange(0, 128, layout=SLICE_FEATURES_LAYOUT)[None, :]
    row_ptrs = row_ptr + token.to(gl.int64)[:, None] * N + feature
    gl.store(row_ptrs, y.to(row_ptr.dtype.element_ty), mask=mask[:, None])
    gl.store(scale_ptr + n_block.to(gl.int64) * R + token, scale, mask=mask)


@gluon.jit(do_not_specialize=["R"])
def fp8_swiglu_kernel(
    h_ptr, h_scale_ptr, probs_ptr, row_ptr, scale_ptr, R, N, stride_h,
    SCALED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Quantize the activation of 8 * SLICES tokens by 128 features, as rows."""
    n_block = gl.program_id(0) % (N // 128)
    row0 = gl.program_id(0) // (N // 128) * (8 * SLICES)
    inputs, outs = (h_ptr, h_scale_ptr, probs_ptr, R, stride_h), (row_ptr, scale_ptr)
    slice0 = load_gate_up(inputs, row0, 0, n_block, N, SCALED)
    slice1 = load_gate_up(inputs, row0, 1, n_block, N, SCALED)
    slice2, slice3 = slice0, slice1
    if SLICES == 4:
        slice2 = load_gate_up(inputs, row0, 2, n_block, N, SCALED)
        slice3 = load_gate_up(inputs, row0, 3, n_block, N, SCALED)
    store_swiglu(slice0, inputs, outs, row0, 0, n_block, N, SCALED)
    store_swiglu(slice1, inputs, outs, row0, 1, n_block, N, SCALED)
    if SLICES == 4:
        store_swiglu(slice2, inputs, outs, row0, 2, n_block, N, SCALED)
        store_swiglu(slice3, inputs, outs, row0, 3, n_block, N, SCALED)
