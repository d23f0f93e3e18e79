"""Codes of a tile of 128 tokens by 128 features on their way to columns, on Hopper in Gluon.

A tile is made in four rounds of 32 tokens: those of round i are 16 t + 4 i + j, t < 8 and j < 4. Codes of four tokens
of a feature are one word, and words wait in shared memory, [round][t][feature], for the largest scale of their square.
Then a thread reads the words of 16 tokens of a feature, without a conflict, shifts them and stores 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# of 8 groups of 16 tokens x 128 features, and of 128 features x 32 words
TURNED = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [1, 4], [0, 1]))
STORED = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
GROUPS_OF_16 = gl.constexpr(gl.SliceLayout(1, TURNED.value))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0]))
SCALES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
UNPACKED = gl.constexpr(
    "{ .reg .b16 lo, hi; .reg .b32 a, b; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 a, lo; "
    "cvt.rn.f16x2.e4m3x2 b, hi; mul.rn.f16x2 a, a, $2; mul.rn.f16x2 b, b, $3; "
    "cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $0, {lo, hi}; }"
)


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
def keep_scales(room, i, a, b, SECOND: gl.constexpr):
    _, s0, s1, s2, s3 = room
    if SECOND:
        s2.index(i).store(a)
        s3.index(i).store(b)
    else:
        s0.index(i).store(a)
        s1.index(i).store(b)


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
    """Those of a thread's tokens j of round i."""
    _, s0, s1, s2, s3 = room
    a, b = s0.index(i).load(GROUPS_OF_16), s1.index(i).load(GROUPS_OF_16)
    return a, b, s2.index(i).load(GROUPS_OF_16), s3.index(i).load(GROUPS_OF_16)


@gluon.jit
def largest(room, i: gl.constexpr):
    a, b, c, d = scales_of(room, i)
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def store_turned(room, col_ptr, square_ptr, N, first, block, blocks, col0):
    """The words of a part, shifted to the largest of their scales, as 128 bytes of each of N features from `first`."""
    square = gl.maximum(largest(room, 0), largest(room, 1))
    square = gl.max(gl.maximum(square, gl.maximum(largest(room, 2), largest(room, 3))), axis=0)
    gl.store(square_ptr + ((first + col0) // 128).to(gl.int64) * blocks + block, square)
    w0, w1 = shifted(room, 0, square), shifted(room, 1, square)
    w2, w3 = shifted(room, 2, square), shifted(room, 3, square)
    four = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape((8, 128, 4)).permute((1, 0, 2))
    four = gl.convert_layout(four.reshape((128, 32)), STORED, assert_trivial=True)
    n = col0 + gl.arange(0, 128, layout=gl.SliceLayout(1, STORED))
    t = gl.arange(0, 32, layout=gl.SliceLayout(0, STORED))
    at = (first + n).to(gl.int64)[:, None] * (blocks * 32) + block * 32 + t[None, :]
    mask = (n < N)[:, None] & (t < 32)[None, :]
    gl.store(col_ptr.to(gl.pointer_type(gl.uint32)) + at, four, mask=mask)


@gluon.jit
def shifted(room, i: gl.constexpr, square):
    s0, s1, s2, s3 = scales_of(room, i)
    w = room[0].index(i).load(TURNED)
    w, low = gl.broadcast(w, gl.expand_dims(ratios(square, s0, s1), 1))
    w, high = gl.broadcast(w, gl.expand_dims(ratios(square, s2, s3), 1))
    return gl.inline_asm_elementwise(
        UNPACKED, "=r,r,r,r", [w, low, high], gl.uint32, is_pure=True, pack=1
    )


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
