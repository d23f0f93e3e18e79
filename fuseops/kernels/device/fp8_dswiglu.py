"""SwiGLU and its backward on Hopper in Gluon, as FP8 operands, each input read once.

A program of the backward has tiles of 128 tokens by 128 features of one group, which come 32 tokens at a time: see
`fp8_turned`. Inputs are on their way to shared memory while those before them are worked on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .fp8_turned import (
    EACH,
    PART,
    PARTS,
    blocks_of_part,
    fourths,
    room,
    store_each,
    store_turned,
    tokens_of_part,
)
from .gluon_names import load_rows, thread_barrier

AS_IT_LIES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))
INPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 8 tokens x 128
TOKENS = gl.constexpr(gl.SliceLayout(1, INPUTS.value))
FEATURES = gl.constexpr(gl.SliceLayout(0, INPUTS.value))

ROUND = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
WORD = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)


@gluon.jit
def instruction(WORDS_OF_IT: gl.constexpr, x):
    return gl.inline_asm_elementwise(WORDS_OF_IT, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def silu_slope(x):
    """(silu, its slope), by the instructions for a power of two and a reciprocal."""
    power = instruction("ex2.approx.ftz.f32 $0, $1;", x * -1.4426950408889634)
    s = instruction("rcp.approx.ftz.f32 $0, $1;", 1.0 + power)
    y = x * s
    return y, s + y * (1.0 - s)


@gluon.jit
def power_of_two(amax, SHIFT: gl.constexpr):
    """As device.operands.power_of_two."""
    bits = gl.minimum(amax, 3.4028234663852886e38).to(gl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(254 + SHIFT - (bits >> 23) - above, 190)
    inv = (exponent << 23).to(gl.float32, bitcast=True)
    return inv, ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scaled(x):
    """(rounded x times its inverse scales, scales), one a token."""
    x = gl.inline_asm_elementwise(ROUND, "=r,=r,r,r", [x], gl.float32, is_pure=True, pack=2)
    amax = gl.maximum(gl.max(gl.abs(x), axis=1), 0.0)
    inv, scale = power_of_two(amax, 8)
    return x * inv[:, None], scale


@gluon.jit
def coded(x):
    """(codes, four features in a word, and scales, one a token)"""
    x, scale = scaled(x)
    four = fourths(x.reshape((x.shape[0], 32, 2, 2)))
    return gl.inline_asm_elementwise(
        WORD, "=r,f,f,f,f", four, gl.uint32, is_pure=True, pack=1
    ), scale


@gluon.jit
def ring_of(h_ptr, STAGES: gl.constexpr):
    """Shared memory of what so many parts are made of."""
    kind: gl.constexpr = h_ptr.dtype.element_ty
    das = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PART, 128], AS_IT_LIES)
    gates = gl.allocate_shared_memory(kind, [STAGES, PART, 128], AS_IT_LIES)
    ups = gl.allocate_shared_memory(kind, [STAGES, PART, 128], AS_IT_LIES)
    gate_scales = gl.allocate_shared_memory(gl.float32, [STAGES, PART], EACH)
    up_scales = gl.allocate_shared_memory(gl.float32, [STAGES, PART], EACH)
    probs = gl.allocate_shared_memory(gl.float32, [STAGES, PART], EACH)
    return das, gates, ups, gate_scales, up_scales, probs


@gluon.jit
def where(layout: gl.constexpr, row, end, stride, there):
    """(where the numbers of a part are, counted from its first, which of them there are)"""
    r = tokens_of_part(gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    return r * stride + c, (row + r < end) & there


@gluon.jit
def ask(inputs, ring, slot, row, end, num, there, SCALED: gl.constexpr):
    """Have block `num` of features of the part whose first token is `row` brought, if it is there at all."""
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, R, N, stride_da, stride_h = inputs
    das, gates, ups, gate_scales, up_scales, probs = ring
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    r = tokens_of_part(gl.BlockedLayout([1], [32], [WARPS], [0]))
    keep = (row + r < end) & there
    at, full = where(WIDE, row, end, stride_da, there)
    da = da_ptr + row.to(gl.int64) * stride_da + num * 128
    load_rows(das.index(slot), da + at, mask=full)
    gate = h_ptr + row.to(gl.int64) * stride_h + num * 128
    if h_ptr.dtype.element_ty == gl.float8e4nv:
        CODES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        at, full = where(CODES, row, end, stride_h, there)
        scale = h_scale_ptr + num.to(gl.int64) * R + row
        load_rows(gate_scales.index(slot), scale + r, mask=keep)
        load_rows(up_scales.index(slot), scale + (N // 128).to(gl.int64) * R + r, mask=keep)
    else:
        at, full = where(WIDE, row, end, stride_h, there)
    load_rows(gates.index(slot), gate + at, mask=full)
    load_rows(ups.index(slot), gate + N + at, mask=full)
    if SCALED:
        load_rows(probs.index(slot), probs_ptr + row + r, mask=keep)
    async_copy.commit_group()


@gluon.jit
def brought(numbers, scales, layout: gl.constexpr):
    """Numbers of a part as float32, of codes times their scales."""
    x = numbers.load(layout).to(gl.float32)
    if numbers.dtype == gl.float8e4nv:
        x *= scales.load(gl.SliceLayout(1, layout))[:, None]
    return x


@gluon.jit
def part_of_tile(
    ring, slot, rooms, row_ptr, row, end, num, N, i,
    SCALED: gl.constexpr, ROW: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Make dgate, dup and the activation of a part: rows are stored, and what is of columns waits in its room."""
    das, gates, ups, gate_scales, up_scales, probs = ring
    of_gate, of_up, of_act, dots = rooms
    WARPS: gl.constexpr = gl.num_warps()
    MADE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    STORED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    da = das.index(slot).load(MADE).to(gl.float32)
    gate = brought(gates.index(slot), gate_scales.index(slot), MADE)
    up = brought(ups.index(slot), up_scales.index(slot), MADE)
    f, df = silu_slope(gate)
    y, dy = f * up, da
    if SCALED:
        p = probs.index(slot).load(gl.SliceLayout(1, MADE))
        dots.index(i).store(gl.sum(da * y, axis=1))
        dy, y = da * p[:, None], y * p[:, None]
    g, g_scale = coded(dy * df * up)
    u, u_scale = coded(dy * f)
    of_gate[0].index(i).store(g)
    of_up[0].index(i).store(u)
    of_gate[1].index(i).store(g_scale)
    of_up[1].index(i).store(u_scale)
    if ACT:
        a, a_scale = coded(y)
        of_act[0].index(i).store(a)
        of_act[1].index(i).store(a_scale)
    if ROW:
        to = row_ptr + row.to(gl.int64) * (2 * N) + num * 128
        to = to.to(gl.pointer_type(gl.uint32))
        r = tokens_of_part(gl.SliceLayout(1, STORED))[:, None]
        at = r * (N // 2) + gl.arange(0, 32, layout=gl.SliceLayout(0, STORED))[None, :]
        keep = row + r < end
        gl.store(to + at, gl.convert_layout(g, STORED, assert_trivial=True), mask=keep)
        gl.store(to + N // 4 + at, gl.convert_layout(u, STORED, assert_trivial=True), mask=keep)


@gluon.jit(do_not_specialize=["R", "parts", "span", "beside"])
def fp8_dswiglu_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, parts, stride_da, stride_h, span, beside,
    SCALED: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, ACT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program has `span` blocks of features of a part of a group, evenly spread: what programs side by side write
    meanwhile lies side by side, as do `beside` parts of a group.
    """
    num_n = N // 128
    apart = (num_n + span - 1) // span
    side = gl.program_id(0) % beside
    num0 = gl.program_id(0) // beside % apart
    rest = gl.program_id(0) // beside // apart
    low, high, begin, end, first, total = blocks_of_part(
        (rest // E * beside + side) * E + rest % E, offs_ptr, R, E, parts, GROUPS
    )
    ring = ring_of(h_ptr, STAGES)
    of_gate, of_up, of_act = room(), room(), room()
    dots = gl.allocate_shared_memory(gl.float32, [PARTS, PART], EACH)
    rooms = of_gate, of_up, of_act, dots
    inputs = da_ptr, h_ptr, h_scale_ptr, probs_ptr, R, N, stride_da, stride_h
    for block in range(low, high):
        row0 = begin + (block - first) * 128
        i_asked, num_asked = 0 * block, num0
        for k in gl.static_range(STAGES - 1):
            ask(inputs, ring, k, row0 + 4 * i_asked, end, num_asked, num_asked < num_n, SCALED)
            i_asked, num_asked = following(i_asked, num_asked, apart)
        slot = 0 * num0
        for num in range(num0, num_n, apart):
            for i in range(PARTS):
                async_copy.wait_group(STAGES - 2)
                thread_barrier()
                free = gl.where(slot == 0, STAGES - 1, slot - 1)
                row = row0 + 4 * i_asked
                ask(inputs, ring, free, row, end, num_asked, num_asked < num_n, SCALED)
                i_asked, num_asked = following(i_asked, num_asked, apart)
                part_of_tile(
                    ring, slot, rooms, row_ptr, row0 + 4 * i, end, num, N, i, SCALED, ROW, ACT
                )
                slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            thread_barrier()
            if ROW:
                store_each(of_gate[1], scale_ptr, num, R, row0, end)
                store_each(of_up[1], scale_ptr, num_n + num, R, row0, end)
            if SCALED:
                store_each(dots, partial_ptr, num, R, row0, end)
            if COL:
                store_turned(of_gate, col_ptr, square_ptr, 0 * num0, block, total, num)
                store_turned(of_up, col_ptr, square_ptr, N, block, total, num)
            if ACT:
                store_turned(of_act, a_ptr, a_square_ptr, 0 * num0, block, total, num)
        async_copy.wait_group(0)
        thread_barrier()


@gluon.jit
def following(i, num, apart):
    """The part after part i of block `num` of features, and its block."""
    last = i + 1 == PARTS
    return gl.where(last, 0, i + 1), gl.where(last, num + apart, num)


@gluon.jit
def read(ptr, scale_ptr, at, r, keep, block, R):
    """(a slice of h, or the codes of it, their scales)"""
    if ptr.dtype.element_ty == gl.float8e4nv:
        q = gl.load(ptr.to(gl.pointer_type(gl.uint8)) + at, mask=keep[:, None], other=0)
        scale = gl.load(scale_ptr + block.to(gl.int64) * R + r, mask=keep, other=0.0)
        return q, scale
    else:
        return gl.load(ptr + at, mask=keep[:, None], other=0.0), r.to(gl.float32)


@gluon.jit
def value(x, scale, ptr):
    """What was read, as float32 numbers."""
    if ptr.dtype.element_ty == gl.float8e4nv:
        return x.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale[:, None]
    else:
        return x.to(gl.float32)


@gluon.jit
def asked_hidden(inputs, row0, i: gl.constexpr, block, N, SCALED: gl.constexpr):
    """h of eight tokens, as it lies in memory, and their probabilities."""
    h_ptr, h_scale_ptr, probs_ptr, R, stride_h = inputs
    r = row0 + 8 * i + gl.arange(0, 8, layout=TOKENS)
    keep = r < R
    at = (
        r.to(gl.int64)[:, None] * stride_h
        + block * 128
        + gl.arange(0, 128, layout=FEATURES)[None, :]
    )
    gate, gate_scale = read(h_ptr, h_scale_ptr, at, r, keep, block, R)
    up, up_scale = read(h_ptr, h_scale_ptr, at + N, r, keep, block + N // 128, R)
    probs = gate_scale
    if SCALED:
        probs = gl.load(probs_ptr + r, mask=keep, other=0.0)
    return gate, up, gate_scale, up_scale, probs


@gluon.jit
def store_activation(given, inputs, outs, row0, i: gl.constexpr, block, N, SCALED: gl.constexpr):
    gate, up, gate_scale, up_scale, probs = given
    h_ptr, _, _, R, _ = inputs
    row_ptr, scale_ptr = outs
    f, _ = silu_slope(value(gate, gate_scale, h_ptr))
    y = f * value(up, up_scale, h_ptr)
    if SCALED:
        y *= probs[:, None]
    y, scale = scaled(y)
    r = row0 + 8 * i + gl.arange(0, 8, layout=TOKENS)
    keep = r < R
    c = block * 128 + gl.arange(0, 128, layout=FEATURES)[None, :]
    at = row_ptr + r.to(gl.int64)[:, None] * N + c
    gl.store(at, y.to(row_ptr.dtype.element_ty), mask=keep[:, None])
    gl.store(scale_ptr + block.to(gl.int64) * R + r, scale, mask=keep)


@gluon.jit(do_not_specialize=["R"])
def fp8_swiglu_kernel(
    h_ptr, h_scale_ptr, probs_ptr, row_ptr, scale_ptr, R, N, stride_h,
    SCALED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Rows of the activation of 8 * SLICES tokens by 128 features."""
    block = gl.program_id(0) % (N // 128)
    row0 = gl.program_id(0) // (N // 128) * (8 * SLICES)
    inputs, outs = (h_ptr, h_scale_ptr, probs_ptr, R, stride_h), (row_ptr, scale_ptr)
    a = asked_hidden(inputs, row0, 0, block, N, SCALED)
    b = asked_hidden(inputs, row0, 1, block, N, SCALED)
    c, d = a, b
    if SLICES == 4:
        c = asked_hidden(inputs, row0, 2, block, N, SCALED)
        d = asked_hidden(inputs, row0, 3, block, N, SCALED)
    store_activation(a, inputs, outs, row0, 0, block, N, SCALED)
    store_activation(b, inputs, outs, row0, 1, block, N, SCALED)
    if SLICES == 4:
        store_activation(c, inputs, outs, row0, 2, block, N, SCALED)
        store_activation(d, inputs, outs, row0, 3, block, N, SCALED)
