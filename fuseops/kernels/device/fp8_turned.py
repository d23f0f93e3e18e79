"""Codes of a tile of 128 tokens by 128 features on their way to columns, on Hopper in Gluon.

They wait in shared memory, four features of a token in a word, for the largest scale of their square. Then a thread
reads the words of 16 tokens, without a conflict, turns and shifts four features of four tokens at a time and stores 16
bytes of each feature. A tile comes in parts of 32 tokens: token 16 t + 4 i + j is row 4 t + j of part i.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_names import reinterpret

PART = gl.constexpr(32)  # tokens
PARTS = gl.constexpr(4)
# of a part's words, and of what there is one of for a token
WORDS = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=8, order=[1, 0]))
EACH = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
# of all parts
ALL_WORDS = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=8, order=[2, 1, 0]))
ALL = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))

HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# Words of tokens a, b, c, d, whose bytes are features, and the ratios of a and b, and of c and d, become words of
# features: bytes are first paired, which is what converts to two numbers.
TURN = gl.constexpr("""{
.reg .b32 p, q, r, s, a, b, c, d, e, f, g, h; .reg .b16 p0, p1, q0, q1, r0, r1, s0, s1;
prmt.b32 p, $4, $5, 0x5140; prmt.b32 q, $4, $5, 0x7362; prmt.b32 r, $6, $7, 0x5140; prmt.b32 s, $6, $7, 0x7362;
mov.b32 {p0, p1}, p; mov.b32 {q0, q1}, q; mov.b32 {r0, r1}, r; mov.b32 {s0, s1}, s;
cvt.rn.f16x2.e4m3x2 a, p0; cvt.rn.f16x2.e4m3x2 b, p1; cvt.rn.f16x2.e4m3x2 c, q0; cvt.rn.f16x2.e4m3x2 d, q1;
cvt.rn.f16x2.e4m3x2 e, r0; cvt.rn.f16x2.e4m3x2 f, r1; cvt.rn.f16x2.e4m3x2 g, s0; cvt.rn.f16x2.e4m3x2 h, s1;
mul.rn.f16x2 a, a, $8; mul.rn.f16x2 b, b, $8; mul.rn.f16x2 c, c, $8; mul.rn.f16x2 d, d, $8;
mul.rn.f16x2 e, e, $9; mul.rn.f16x2 f, f, $9; mul.rn.f16x2 g, g, $9; mul.rn.f16x2 h, h, $9;
cvt.rn.satfinite.e4m3x2.f16x2 p0, a; cvt.rn.satfinite.e4m3x2.f16x2 p1, b;
cvt.rn.satfinite.e4m3x2.f16x2 q0, c; cvt.rn.satfinite.e4m3x2.f16x2 q1, d;
cvt.rn.satfinite.e4m3x2.f16x2 r0, e; cvt.rn.satfinite.e4m3x2.f16x2 r1, f;
cvt.rn.satfinite.e4m3x2.f16x2 s0, g; cvt.rn.satfinite.e4m3x2.f16x2 s1, h;
mov.b32 $0, {p0, r0}; mov.b32 $1, {p1, r1}; mov.b32 $2, {q0, s0}; mov.b32 $3, {q1, s1};
}""")


@gluon.jit
def room():
    """Shared memory of a tile's codes, part by part, and of their scales."""
    words = gl.allocate_shared_memory(gl.uint32, [PARTS, PART, 32], WORDS)
    return words, gl.allocate_shared_memory(gl.float32, [PARTS, PART], EACH)


@gluon.jit
def tokens_of_part(layout: gl.constexpr):
    """The tokens of a part, counted from its first, which is 4 i."""
    s = gl.arange(0, PART, layout=layout)
    return 16 * (s // 4) + s % 4


@gluon.jit
def all_parts(numbers, layout: gl.constexpr):
    """What there is one of for each token."""
    return reinterpret(numbers, gl.float32, [PARTS, PART], ALL).load(layout)


@gluon.jit
def store_each(numbers, to_ptr, num, R, row0, end):
    """Numbers of the tokens from row0 to `end` as a part of row `num` of (.., R)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, gl.num_warps()], [1, 0])
    i = gl.arange(0, PARTS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    s = gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    r = 16 * (s // 4) + 4 * i + s % 4
    to = to_ptr + num.to(gl.int64) * R + row0
    gl.store(to + r, all_parts(numbers, LAYOUT), mask=row0 + r < end)


@gluon.jit
def fourths(x):
    """x (..., 2, 2), apart"""
    even, odd = x.split()
    a, c = even.split()
    b, d = odd.split()
    return a, b, c, d


@gluon.jit
def ratios(scale, inverse):
    """scale (32, 2, 2) times the inverse of their square's: of the first two of four tokens, and of the others, as
    float16. What they shift to nothing may round.
    """
    a, b, c, d = fourths(scale * inverse)
    ab = gl.inline_asm_elementwise(HALVES, "=r,f,f", [a, b], gl.uint32, is_pure=True, pack=1)
    return ab, gl.inline_asm_elementwise(HALVES, "=r,f,f", [c, d], gl.uint32, is_pure=True, pack=1)


@gluon.jit
def store_turned(room, col_ptr, square_ptr, first, block, blocks, num):
    """The codes of a tile, shifted to the largest of their scales, as 128 bytes of each of 128 features: of block `num`
    of features, counted from `first`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    READ: gl.constexpr = gl.BlockedLayout([4, 4, 1], [1, 8, 4], [1, 1, WARPS], [1, 0, 2])
    STORED: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS, 1], [1, 0])
    words, scales = room
    scale = all_parts(scales, gl.SliceLayout(2, READ))
    square = gl.maximum(gl.max(gl.max(scale, axis=1), axis=0), 2.0**-63)
    gl.store(square_ptr + (first // 128 + num).to(gl.int64) * blocks + block, square)
    inverse = ((254 << 23) - square.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    scale = scale.reshape((4, 8, 4)).permute((1, 0, 2)).reshape((32, 2, 2))
    ab, cd = ratios(scale, inverse)
    x = reinterpret(words, gl.uint32, [PARTS, PART, 32], ALL_WORDS).load(READ)
    x = x.reshape((4, 8, 4, 32)).permute((1, 0, 2, 3)).reshape((32, 2, 2, 32))
    a, b, c, d = fourths(x.permute((0, 3, 1, 2)))
    OF_FOUR: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    a, ab = gl.broadcast(a, gl.convert_layout(ab, OF_FOUR, assert_trivial=True)[:, None])
    a, cd = gl.broadcast(a, gl.convert_layout(cd, OF_FOUR, assert_trivial=True)[:, None])
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        TURN, "=r,=r,=r,=r,r,r,r,r,r,r", [a, b, c, d, ab, cd],
        (gl.uint32, gl.uint32, gl.uint32, gl.uint32), is_pure=True, pack=1,
    )  # fmt: skip
    y = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape((32, 128)).permute((1, 0))
    y = gl.convert_layout(y, STORED, assert_trivial=True)
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, STORED))[:, None]
    t = gl.arange(0, 32, layout=gl.SliceLayout(0, STORED))[None, :]
    to = col_ptr + ((first + num * 128).to(gl.int64) * blocks + block) * 128
    gl.store(to.to(gl.pointer_type(gl.uint32)) + n * (blocks * 32) + t, y)


@gluon.jit
def unknown(x):
    """x, as a number that the compiler knows nothing of: it keeps addresses apart in registers that it can tell from
    each other.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def blocks_of_part(program, offs_ptr, R, E, parts, GROUPED: gl.constexpr):
    """As device.operands.blocks_of_part."""
    part, group = program // E, program % E
    begin, end, total = unknown(R * 0), R, (R + 127) // 128
    first, last = R * 0, total
    if GROUPED:
        begin = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        end = gl.load(offs_ptr + group)
        first, total = begin // 128 + group, R // 128 + E
        last = gl.where(group == E - 1, total, end // 128 + group + 1)
        end = gl.minimum(end, R)
    size = last - first
    return (
        first + size * part // parts,
        first + size * (part + 1) // parts,
        begin,
        end,
        first,
        total,
    )
