"""The backward of SwiGLU on Hopper in Gluon: dh and the activation as FP8 operands, each input read once.

A program has a tile of 128 tokens by 128 features of one group: see `fp8_turned`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fp8_turned import blocks_of_part, keep_scales, room_of_part, store_turned
from .gluon_names import thread_barrier

INPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 8 tokens x 128
TOKENS = gl.constexpr(gl.SliceLayout(1, INPUTS.value))
FEATURES = gl.constexpr(gl.SliceLayout(0, INPUTS.value))

ROUND = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
HALF = gl.constexpr(
    "{ .reg .b16 half; cvt.rn.satfinite.e4m3x2.f32 half, $2, $1; cvt.u32.u16 $0, half; }"
)
WHOLE = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 hi, $3, $2; cvt.u16.u32 lo, $1; mov.b32 $0, {lo, hi}; }"
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
def asked(inputs, tile, i, j: gl.constexpr, SCALED: gl.constexpr):
    """The inputs of eight tokens, as they lie in memory: asked for before the work on those before them, whose stores
    nothing is loaded across.
    """
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, _, R, N, stride_da, stride_h = inputs
    row0, end, col0, num = tile
    r = row0 + 16 * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
    keep = r < end
    c = col0 + gl.arange(0, 128, layout=FEATURES)[None, :]
    wide = r.to(gl.int64)[:, None]
    da = gl.load(da_ptr + wide * stride_da + c, mask=keep[:, None], other=0.0)
    at = wide * stride_h + c
    gate, gate_scale = read(h_ptr, h_scale_ptr, at, r, keep, num, R)
    up, up_scale = read(h_ptr, h_scale_ptr, at + N, r, keep, num + N // 128, R)
    probs = gate_scale
    if SCALED:
        probs = gl.load(probs_ptr + r, mask=keep, other=0.0)
    return da, gate, up, gate_scale, up_scale, probs


@gluon.jit
def slice_of_tile(given, inputs, tile, i, j: gl.constexpr, SCALED: gl.constexpr):
    """What dgate, dup and the activation of eight tokens are before they are codes, with their scales."""
    da, gate, up, gate_scale, up_scale, probs = given
    _, h_ptr, _, _, partial_ptr, R, _, _, _ = inputs
    row0, end, _, num = tile
    da = da.to(gl.float32)
    f, df = silu_slope(value(gate, gate_scale, h_ptr))
    y, dy = f * value(up, up_scale, h_ptr), da
    if SCALED:
        r = row0 + 16 * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
        gl.store(partial_ptr + num.to(gl.int64) * R + r, gl.sum(da * y, axis=1), mask=r < end)
        dy, y = da * probs[:, None], y * probs[:, None]
    up = value(up, up_scale, h_ptr)
    g, g_scale = scaled(dy * df * up)
    u, u_scale = scaled(dy * f)
    a, a_scale = scaled(y)
    return g, u, a, g_scale, u_scale, a_scale


@gluon.jit
def store_row(
    row_ptr, scale_ptr, x, scale, tile, R, width, first, i, j: gl.constexpr, STEP: gl.constexpr = 16
):
    row0, end, col0, _ = tile
    r = row0 + STEP * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
    c = first + col0 + gl.arange(0, 128, layout=FEATURES)[None, :]
    keep = r < end
    at = row_ptr + r.to(gl.int64)[:, None] * width + c
    gl.store(at, x.to(row_ptr.dtype.element_ty), mask=keep[:, None])
    gl.store(scale_ptr + ((first + col0) // 128).to(gl.int64) * R + r, scale, mask=keep)


@gluon.jit
def half(a, b):
    """Codes of two tokens, in the low half of a word."""
    return gl.inline_asm_elementwise(HALF, "=r,f,f", [a, b], gl.uint32, is_pure=True, pack=1)


@gluon.jit
def whole(low, c, d):
    """A word of the half, and of the codes of two more."""
    return gl.inline_asm_elementwise(
        WHOLE, "=r,r,f,f", [low, c, d], gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def pair_of_slices(
    inputs, outs, tile, i, SECOND: gl.constexpr, SCALED: gl.constexpr, ROW: gl.constexpr
):
    """Two tokens of each four: rows are stored, and what is of columns is returned."""
    row_ptr, scale_ptr, of_gate, of_up, of_act = outs
    R, N = inputs[5], inputs[6]
    J: gl.constexpr = 2 if SECOND else 0
    first, second = asked(inputs, tile, i, J, SCALED), asked(inputs, tile, i, J + 1, SCALED)
    g0, u0, a0, gs0, us0, as0 = slice_of_tile(first, inputs, tile, i, J, SCALED)
    if ROW:
        store_row(row_ptr, scale_ptr, g0, gs0, tile, R, 2 * N, 0, i, J)
        store_row(row_ptr, scale_ptr, u0, us0, tile, R, 2 * N, N, i, J)
    g1, u1, a1, gs1, us1, as1 = slice_of_tile(second, inputs, tile, i, J + 1, SCALED)
    if ROW:
        store_row(row_ptr, scale_ptr, g1, gs1, tile, R, 2 * N, 0, i, J + 1)
        store_row(row_ptr, scale_ptr, u1, us1, tile, R, 2 * N, N, i, J + 1)
    keep_scales(of_gate, i, gs0, gs1, SECOND)
    keep_scales(of_up, i, us0, us1, SECOND)
    keep_scales(of_act, i, as0, as1, SECOND)
    return g0, g1, u0, u1, a0, a1


@gluon.jit(do_not_specialize=["R", "parts"])
def fp8_dswiglu_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, parts, stride_da, stride_h,
    SCALED: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, ACT: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    num_n = N // 128
    num = gl.program_id(0) % num_n
    low, high, begin, end, first, total = blocks_of_part(
        gl.program_id(0) // num_n, offs_ptr, R, E, parts, GROUPS
    )
    of_gate, of_up, of_act = room_of_part(), room_of_part(), room_of_part()
    inputs = da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, R, N, stride_da, stride_h
    outs = row_ptr, scale_ptr, of_gate, of_up, of_act
    col0 = num * 128
    for block in range(low, high):
        tile = begin + (block - first) * 128, end, col0, num
        thread_barrier()  # until all have read the tile before
        for i in range(4):
            g0, g1, u0, u1, a0, a1 = pair_of_slices(inputs, outs, tile, i, False, SCALED, ROW)
            g, u, a = half(g0, g1), half(u0, u1), half(a0, a1)
            g2, g3, u2, u3, a2, a3 = pair_of_slices(inputs, outs, tile, i, True, SCALED, ROW)
            of_gate[0].index(i).store(whole(g, g2, g3))
            of_up[0].index(i).store(whole(u, u2, u3))
            of_act[0].index(i).store(whole(a, a2, a3))
        thread_barrier()
        if COL:
            store_turned(of_gate, col_ptr, square_ptr, N, 0, block, total, col0)
            store_turned(of_up, col_ptr, square_ptr, N, N, block, total, col0)
        if ACT:
            store_turned(of_act, a_ptr, a_square_ptr, N, 0, block, total, col0)


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
    store_row(row_ptr, scale_ptr, y, scale, (row0 + 8 * i, R, block * 128, 0), R, N, 0, 0, 0, 1)


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
