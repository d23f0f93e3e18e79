"""Transposed store of FP8 codes on Hopper in Gluon: from rows, a scale each token, to columns, a scale each square.

A tile of 128 tokens by 128 features waits in shared memory, four features of a token in a 32-bit word, until the
largest scale of the square is known. Then each thread loads one word of each of 16 consecutive tokens, without bank
conflicts, transposes 4 x 4 bytes at a time by byte permutes (PRMT), rescales codes to the square's scale as float16,
two at a time, and stores 16 bytes of each of its four features.

The tile comes in four subtiles of 32 tokens, and in such an order that a thread of the transpose finds its 16 tokens in
its own registers: token 16 t + 4 i + j of the tile is row 4 t + j of subtile i.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_names import reinterpret

SUBTILE_ROWS = gl.constexpr(32)  # tokens of a subtile
SUBTILES = gl.constexpr(4)  # of a tile of 128 tokens
# smem layouts of a subtile: of words of codes (32 tokens, 32), and of one number a token
CODES_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=8, order=[1, 0]))
TOKENS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
# the same memory as a whole tile, for `reinterpret`: (4, 32, 32) and (4, 32)
TILE_CODES_LAYOUT = gl.constexpr(
    gl.SwizzledSharedLayout(vec=4, per_phase=4, max_phase=8, order=[2, 1, 0])
)
TILE_TOKENS_LAYOUT = gl.constexpr(
    gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
)

PACK_F16X2_ASM = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# In: words $4 to $7 of tokens a, b, c, d, whose bytes are four features, and their ratios as f16x2, $8 of (a, b) and
# $9 of (c, d). Out: words $0 to $3 of the four features, whose bytes are tokens. PRMT first pairs the bytes of one
# feature of (a, b), and of (c, d): cvt converts pairs, and one mul.f16x2 rescales both.
TRANSPOSE_RESCALE_ASM = gl.constexpr("""{
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
def allocate_codes():
    """Allocate shared memory of a tile: (words of codes (4, 32, 32), scales (4, 32)), subtile by subtile."""
    words = gl.allocate_shared_memory(gl.uint32, [SUBTILES, SUBTILE_ROWS, 32], CODES_LAYOUT)
    return words, gl.allocate_shared_memory(gl.float32, [SUBTILES, SUBTILE_ROWS], TOKENS_LAYOUT)


@gluon.jit
def subtile_tokens(layout: gl.constexpr):
    """Return the tokens of a subtile's rows, counted from its first token, which is 4 i of the tile."""
    row = gl.arange(0, SUBTILE_ROWS, layout=layout)
    return 16 * (row // 4) + row % 4


@gluon.jit
def load_token_values(values, layout: gl.constexpr):
    """Load a number for each token of the tile, (4, 32) by subtile and row."""
    return reinterpret(values, gl.float32, [SUBTILES, SUBTILE_ROWS], TILE_TOKENS_LAYOUT).load(
        layout
    )


@gluon.jit
def store_token_values(values, out_ptr, out_row, R, row0, end):
    """Store a number for each token of the tile, row0 to `end`, to row `out_row` of a matrix (.., R)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, gl.num_warps()], [1, 0])
    subtile = gl.arange(0, SUBTILES, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, SUBTILE_ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    token = 16 * (row // 4) + 4 * subtile + row % 4
    tile_ptr = out_ptr + out_row.to(gl.int64) * R + row0
    gl.store(tile_ptr + token, load_token_values(values, LAYOUT), mask=row0 + token < end)


@gluon.jit
def split_four(x):
    """Split x (..., 2, 2) into its four elements of the last two axes, in row-major order."""
    even, odd = x.split()
    a, c = even.split()
    b, d = odd.split()
    return a, b, c, d


@gluon.jit
def rescale_ratios(scale, inv_square):
    """Return each token's scale over the square's, as two f16x2 words: of the first two of four tokens, of the others.

    scale is (32, 2, 2). Ratios are powers of two, at most 1; those too small for float16, which round, belong to codes
    that become zero.
    """
    a, b, c, d = split_four(scale * inv_square)
    ab = gl.inline_asm_elementwise(
        PACK_F16X2_ASM, "=r,f,f", [a, b], gl.uint32, is_pure=True, pack=1
    )
    return ab, gl.inline_asm_elementwise(
        PACK_F16X2_ASM, "=r,f,f", [c, d], gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def store_transposed(codes, col_ptr, square_ptr, first_col, block, num_blocks, n_block):
    """Rescale the codes of a tile to the largest of their scales, and store 128 bytes of each of 128 features.

    codes: as `allocate_codes` gives it, filled. The result is columns (.., num_blocks * 128), from feature first_col +
    128 n_block on, of token block `block`, and one scale in square_ptr (.., num_blocks). All layout conversions are
    trivial: no data moves between threads.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([4, 4, 1], [1, 8, 4], [1, 1, WARPS], [1, 0, 2])
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [WARPS, 1], [1, 0])
    words_smem, scales_smem = codes
    scale = load_token_values(scales_smem, gl.SliceLayout(2, LOAD_LAYOUT))
    square_scale = gl.maximum(gl.max(gl.max(scale, axis=1), axis=0), 2.0**-63)
    gl.store(
        square_ptr + (first_col // 128 + n_block).to(gl.int64) * num_blocks + block, square_scale
    )
    # 1 over a power of two
    inv_square = ((254 << 23) - square_scale.to(gl.int32, bitcast=True)).to(
        gl.float32, bitcast=True
    )
    scale = scale.reshape((4, 8, 4)).permute((1, 0, 2)).reshape((32, 2, 2))
    ab, cd = rescale_ratios(scale, inv_square)
    words = reinterpret(
        words_smem, gl.uint32, [SUBTILES, SUBTILE_ROWS, 32], TILE_CODES_LAYOUT
    ).load(LOAD_LAYOUT)
    words = words.reshape((4, 8, 4, 32)).permute((1, 0, 2, 3)).reshape((32, 2, 2, 32))
    a, b, c, d = split_four(words.permute((0, 3, 1, 2)))
    WORD_LAYOUT: gl.constexpr = gl.SliceLayout(1, a.type.layout)
    a, ab = gl.broadcast(a, gl.convert_layout(ab, WORD_LAYOUT, assert_trivial=True)[:, None])
    a, cd = gl.broadcast(a, gl.convert_layout(cd, WORD_LAYOUT, assert_trivial=True)[:, None])
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        TRANSPOSE_RESCALE_ASM, "=r,=r,=r,=r,r,r,r,r,r,r", [a, b, c, d, ab, cd],
        (gl.uint32, gl.uint32, gl.uint32, gl.uint32), is_pure=True, pack=1,
    )  # fmt: skip
    columns = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape((32, 128)).permute((1, 0))
    columns = gl.convert_layout(columns, STORE_LAYOUT, assert_trivial=True)
    feature = gl.arange(0, 128, layout=gl.SliceLayout(1, STORE_LAYOUT))[:, None]
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, STORE_LAYOUT))[None, :]
    tile_ptr = col_ptr + ((first_col + n_block * 128).to(gl.int64) * num_blocks + block) * 128
    gl.store(tile_ptr.to(gl.pointer_type(gl.uint32)) + feature * (num_blocks * 32) + word, columns)
