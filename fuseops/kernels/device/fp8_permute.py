"""Rows of an FP8 operand by index on Hopper in Gluon, as rows and as columns at one exponent a square.

A program has tiles of 128 rows by 128 features of one group: see `fp8_turned`. Programs that run together take the same
part of all groups: where a group's rows are in order of their tokens, these are copies of the same tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fp8_turned import blocks_of_part, keep_scales, room_of_part, store_turned

INPUTS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [2, 1], [1, 0]))  # of 8 tokens x 128
TOKENS = gl.constexpr(gl.SliceLayout(1, INPUTS.value))
FEATURES = gl.constexpr(gl.SliceLayout(0, INPUTS.value))
# four features of each of four tokens to four tokens of each of four features
FOUR = gl.constexpr(
    "{ .reg .b32 p, q, r, s; prmt.b32 p, $4, $5, 0x5140; prmt.b32 q, $4, $5, 0x7362; "
    "prmt.b32 r, $6, $7, 0x5140; prmt.b32 s, $6, $7, 0x7362; prmt.b32 $0, p, r, 0x5410; "
    "prmt.b32 $1, p, r, 0x7632; prmt.b32 $2, q, s, 0x5410; prmt.b32 $3, q, s, 0x7632; }"
)


@gluon.jit
def codes_of(inputs, outs, tile, i, j: gl.constexpr, ROW: gl.constexpr, INDEX: gl.constexpr):
    """Codes and scales of eight tokens, which are stored as rows too."""
    data_ptr, scale_ptr, index_ptr, R, T, N = inputs
    row_ptr, row_scale_ptr = outs
    row0, end, col0 = tile
    r = row0 + 16 * gl.arange(0, 8, layout=TOKENS) + (4 * i + j)
    keep = r < end
    token = r
    if INDEX:
        token = gl.load(index_ptr + r, mask=keep, other=0).to(gl.int32)
    c = col0 + gl.arange(0, 128, layout=FEATURES)[None, :]
    wide = keep[:, None] & (c < N)
    q = gl.load(data_ptr + token.to(gl.int64)[:, None] * N + c, mask=wide, other=0)
    block = (col0 // 128).to(gl.int64)
    scale = gl.load(scale_ptr + block * T + token, mask=keep, other=2.0**-63)
    if ROW:
        gl.store(row_ptr + r.to(gl.int64)[:, None] * N + c, q, mask=wide)
        gl.store(row_scale_ptr + block * R + r, scale, mask=keep)
    return q, scale


@gluon.jit(do_not_specialize=["R", "T", "parts"])
def fp8_permute_kernel(
    data_ptr, scale_ptr, index_ptr, offs_ptr, row_ptr, row_scale_ptr, col_ptr, square_ptr,
    R, T, N, E, parts,
    ROW: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    num_n = (N + 127) // 128
    low, high, begin, end, first, total = blocks_of_part(
        gl.program_id(0) // num_n, offs_ptr, R, E, parts, GROUPS
    )
    room = room_of_part()
    inputs = data_ptr.to(gl.pointer_type(gl.uint8)), scale_ptr, index_ptr, R, T, N
    outs = row_ptr.to(gl.pointer_type(gl.uint8)), row_scale_ptr
    col0 = gl.program_id(0) % num_n * 128
    for block in range(low, high):
        tile = begin + (block - first) * 128, end, col0
        gl.thread_barrier()  # until all have read the tile before
        for i in range(4):
            a, sa = codes_of(inputs, outs, tile, i, 0, ROW, INDEX)
            b, sb = codes_of(inputs, outs, tile, i, 1, ROW, INDEX)
            c, sc = codes_of(inputs, outs, tile, i, 2, ROW, INDEX)
            d, sd = codes_of(inputs, outs, tile, i, 3, ROW, INDEX)
            four = gl.inline_asm_elementwise(
                FOUR, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], gl.uint32, is_pure=True, pack=4
            )
            room[0].index(i).store(four)
            keep_scales(room, i, sa, sb, False)
            keep_scales(room, i, sc, sd, True)
        gl.thread_barrier()
        store_turned(room, col_ptr, square_ptr, N, 0, block, total, col0)
