"""The backward of SwiGLU on Hopper in Gluon: dh and the activation as FP8 operands, each input read once.

A program has a tile of 128 tokens by 128 features of one group, and makes it in four rounds of 32 tokens: those of
round i are 16 t + 4 i + j, t < 8 and j < 4. Codes of four tokens of a feature are one word, and words wait in shared
memory, [part and round][t][feature], for the largest scale of their square. Then a thread reads the words of 16 tokens
of a feature, without a conflict, shifts them and stores 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 8 tokens x 128
TOKENS = gl.constexpr(gl.SliceLayout(1, INPUTS.value))
FEATURES = gl.constexpr(gl.SliceLayout(0, INPUTS.value))
TURNED = gl.constexpr(
    gl.BlockedLayout([1, 1], [8, 4], [1, 4], [0, 1])
)  # of 8 groups of 16 tokens x 128
GROUPS_OF_16 = gl.constexpr(gl.SliceLayout(1, TURNED.value))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))

ROUND = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
HALF = gl.constexpr(
    "{ .reg .b16 half; cvt.rn.satfinite.e4m3x2.f32 half, $2, $1; cvt.u32.u16 $0, half; }"
)
WHOLE = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 hi, $3, $2; cvt.u16.u32 lo, $1; mov.b32 $0, {lo, hi}; }"
)
UNPACKED = gl.constexpr(
    "{ .reg .b16 lo, hi; .reg .b32 a, b; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 a, lo; "
    "cvt.rn.f16x2.e4m3x2 b, hi; mul.rn.f16x2 a, a, $2; mul.rn.f16x2 b, b, $3; "
    "cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $0, {lo, hi}; }"
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
    """A slice of h, or of what it is codes of."""
    if ptr.dtype.element_ty == gl.float8e4nv:
        q = gl.load(ptr.to(gl.pointer_type(gl.uint8)) + at, mask=keep[:, None], other=0)
        scale = gl.load(scale_ptr + block.to(gl.int64) * R + r, mask=keep, other=0.0)
        return q.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale[:, None]
    else:
        return gl.load(ptr + at, mask=keep[:, None], other=0.0).to(gl.float32)


@gluon.jit
def slice_of_tile(inputs, tile, i, j: gl.constexpr, SCALED: gl.constexpr):
    """What dgate, dup and the activation of eight tokens are before they are codes, with their scales."""
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, R, N, stride_da, stride_h = inputs
    row0, end, col0, num = tile
    r = row0 + 16 * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
    keep = r < end
    c = col0 + gl.arange(0, 128, layout=FEATURES)[None, :]
    wide = r.to(gl.int64)[:, None]
    da = gl.load(da_ptr + wide * stride_da + c, mask=keep[:, None], other=0.0).to(gl.float32)
    at = wide * stride_h + c
    gate = read(h_ptr, h_scale_ptr, at, r, keep, num, R)
    up = read(h_ptr, h_scale_ptr, at + N, r, keep, num + N // 128, R)
    f, df = silu_slope(gate)
    y, dy = f * up, da
    if SCALED:
        gl.store(partial_ptr + num.to(gl.int64) * R + r, gl.sum(da * y, axis=1), mask=keep)
        probs = gl.load(probs_ptr + r, mask=keep, other=0.0)[:, None]
        dy, y = da * probs, y * probs
    g, g_scale = scaled(dy * df * up)
    u, u_scale = scaled(dy * f)
    a, a_scale = scaled(y)
    return g, u, a, g_scale, u_scale, a_scale


@gluon.jit
def store_row(row_ptr, scale_ptr, x, scale, tile, R, width, first, i, j: gl.constexpr):
    row0, end, col0, _ = tile
    r = row0 + 16 * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
    c = first + col0 + gl.arange(0, 128, layout=FEATURES)[None, :]
    keep = r < end
    at = row_ptr + r.to(gl.int64)[:, None] * width + c
    gl.store(at, x.to(row_ptr.dtype.element_ty), mask=keep[:, None])
    gl.store(scale_ptr + ((first + col0) // 128).to(gl.int64) * R + r, scale, mask=keep)


@gluon.jit
def room_of_part():
    """Shared memory of a part: its words, and the scales of the tokens j, each by round. Apart, since a write into one
    allocation waits for the one before.
    """
    words = gl.allocate_shared_memory(gl.uint32, [4, 8, 128], WORDS)
    s0 = gl.allocate_shared_memory(gl.float32, [4, 8], SCALES)
    s1 = gl.allocate_shared_memory(gl.float32, [4, 8], SCALES)
    s2 = gl.allocate_shared_memory(gl.float32, [4, 8], SCALES)
    s3 = gl.allocate_shared_memory(gl.float32, [4, 8], SCALES)
    return words, s0, s1, s2, s3


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
def keep_scales(room, i, a, b, SECOND: gl.constexpr):
    _, s0, s1, s2, s3 = room
    if SECOND:
        s2.index(i).store(a)
        s3.index(i).store(b)
    else:
        s0.index(i).store(a)
        s1.index(i).store(b)


@gluon.jit
def pair_of_slices(
    inputs, outs, tile, i, SECOND: gl.constexpr, SCALED: gl.constexpr, ROW: gl.constexpr
):
    """Two tokens of each four: rows are stored, and what is of columns is returned."""
    row_ptr, scale_ptr, of_gate, of_up, of_act = outs
    R, N = inputs[5], inputs[6]
    J: gl.constexpr = 2 if SECOND else 0
    g0, u0, a0, gs0, us0, as0 = slice_of_tile(inputs, tile, i, J, SCALED)
    if ROW:
        store_row(row_ptr, scale_ptr, g0, gs0, tile, R, 2 * N, 0, i, J)
        store_row(row_ptr, scale_ptr, u0, us0, tile, R, 2 * N, N, i, J)
    g1, u1, a1, gs1, us1, as1 = slice_of_tile(inputs, tile, i, J + 1, SCALED)
    if ROW:
        store_row(row_ptr, scale_ptr, g1, gs1, tile, R, 2 * N, 0, i, J + 1)
        store_row(row_ptr, scale_ptr, u1, us1, tile, R, 2 * N, N, i, J + 1)
    keep_scales(of_gate, i, gs0, gs1, SECOND)
    keep_scales(of_up, i, us0, us1, SECOND)
    keep_scales(of_act, i, as0, as1, SECOND)
    return g0, g1, u0, u1, a0, a1


@gluon.jit
def ratios(square, a, b):
    """square over the scales of two tokens, as two halves of a word."""
    base = square.to(gl.int32, bitcast=True)
    # 2^-less as float16: normal down to 2^-14, and nothing that a shift by more leaves
    a = gl.minimum((base - a.to(gl.int32, bitcast=True)) >> 23, 25)
    b = gl.minimum((base - b.to(gl.int32, bitcast=True)) >> 23, 25)
    low = gl.where(a < 15, (15 - a) << 10, (1024 << 14) >> a)
    high = gl.where(b < 15, (15 - b) << 10, (1024 << 14) >> b)
    return low | (high << 16)


@gluon.jit
def scales_of(room, i: gl.constexpr):
    _, s0, s1, s2, s3 = room
    a, b = s0.index(i).load(GROUPS_OF_16), s1.index(i).load(GROUPS_OF_16)
    return a, b, s2.index(i).load(GROUPS_OF_16), s3.index(i).load(GROUPS_OF_16)


@gluon.jit
def largest(room, i: gl.constexpr):
    a, b, c, d = scales_of(room, i)
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def store_turned(room, col_ptr, square_ptr, first, block, blocks, col0):
    """The words of a part, shifted to the largest of their scales, as 128 bytes of each feature."""
    square = gl.maximum(largest(room, 0), largest(room, 1))
    square = gl.max(gl.maximum(square, gl.maximum(largest(room, 2), largest(room, 3))), axis=0)
    gl.store(square_ptr + ((first + col0) // 128).to(gl.int64) * blocks + block, square)
    w0, w1 = shifted(room, 0, square), shifted(room, 1, square)
    w2, w3 = shifted(room, 2, square), shifted(room, 3, square)
    four = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape((8, 128, 4)).permute((1, 0, 2))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    four = gl.convert_layout(four.reshape((128, 32)), LAYOUT, assert_trivial=True)
    n = first + col0 + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    at = n.to(gl.int64)[:, None] * (blocks * 32) + block * 32 + t[None, :]
    gl.store(col_ptr.to(gl.pointer_type(gl.uint32)) + at, four)


@gluon.jit
def shifted(room, i: gl.constexpr, square):
    s0, s1, s2, s3 = scales_of(room, i)
    w = room[0].index(i).load(TURNED)
    w, low = gl.broadcast(w, gl.expand_dims(ratios(square, s0, s1), 1))
    w, high = gl.broadcast(w, gl.expand_dims(ratios(square, s2, s3), 1))
    return gl.inline_asm_elementwise(
        UNPACKED, "=r,r,r,r", [w, low, high], gl.uint32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["R", "parts"])
def fp8_dswiglu_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, parts, stride_da, stride_h,
    SCALED: gl.constexpr, ROW: gl.constexpr, COL: gl.constexpr, ACT: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    num_n = N // 128
    program, num = gl.program_id(0) // num_n, gl.program_id(0) % num_n
    group = program % E
    part = program // E
    begin, end, total = R * 0, R, (R + 127) // 128
    first, last = R * 0, total
    if GROUPS:
        begin = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        end = gl.load(offs_ptr + group)
        first, total = begin // 128 + group, R // 128 + E
        last = gl.where(group == E - 1, total, end // 128 + group + 1)
        end = gl.minimum(end, R)
    of_gate, of_up, of_act = room_of_part(), room_of_part(), room_of_part()
    inputs = da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, R, N, stride_da, stride_h
    outs = row_ptr, scale_ptr, of_gate, of_up, of_act
    col0, size = num * 128, last - first
    for block in range(first + size * part // parts, first + size * (part + 1) // parts):
        tile = begin + (block - first) * 128, end, col0, num
        gl.thread_barrier()  # until all have read the tile before
        for i in range(4):
            g0, g1, u0, u1, a0, a1 = pair_of_slices(inputs, outs, tile, i, False, SCALED, ROW)
            g, u, a = half(g0, g1), half(u0, u1), half(a0, a1)
            g2, g3, u2, u3, a2, a3 = pair_of_slices(inputs, outs, tile, i, True, SCALED, ROW)
            of_gate[0].index(i).store(whole(g, g2, g3))
            of_up[0].index(i).store(whole(u, u2, u3))
            of_act[0].index(i).store(whole(a, a2, a3))
        gl.thread_barrier()
        if COL:
            store_turned(of_gate, col_ptr, square_ptr, 0, block, total, col0)
            store_turned(of_up, col_ptr, square_ptr, N, block, total, col0)
        if ACT:
            store_turned(of_act, a_ptr, a_square_ptr, 0, block, total, col0)
