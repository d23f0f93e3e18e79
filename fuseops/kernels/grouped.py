"""Grouped GEMMs over rows sorted by group, with the boundaries on the device, without host synchronisation.

Maths: y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e] (* probs));  dw[e] (+)= dy[rows of e].T @ x[rows of e]
Accumulated in float32 in a fixed order, rounded once at the store: bits repeat. Padding rows (at or
beyond offs[-1]) give zero in y and are never read by dw; an empty group gives zero (or adds none).
Shapes: x (R, K), weight (E, N, K), bias (E, N), probs (R,) float32, dy and y (R, N), dw (E, N, K), offs
(E,) int32 row ends on the device. With an index an operand may have any number of rows: its row r is its row
index[r], and the indices of padding rows are never read. The gradient of x is
`grouped_mm(dy, weight.transpose(1, 2), offs)`.
Layout: any strides; axes that no descriptor can describe are read by pointers, and a weight or rows
without a contiguous axis are copied. No alignment of groups, N or K.
Dtypes: bf16, fp16, float32 (in tf32 where `torch.backends.cuda.matmul.allow_tf32`).
Launches: the tile table, shared by all GEMMs over the same offs (`tiles=`), and the GEMM.
Hardware: sm_80 and later; `grouped_launch` says which kernel runs. The twins' loop reads `offs`,
so traced code and fake tensors see the registered ops.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.bias import grouped_bias_bwd
from fuseops.kernels.grouped_launch import Gradient, Product, launch_mm, launch_wgrad, table_size
from fuseops.kernels.groups import bounds_of
from fuseops.kernels.launch import device, launch, thread
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta
from fuseops.kernels.tiles import FLOATS, as_rows, check_spec, pow2, upcast


def _gathered(x: Tensor, index: Tensor | None, offs: Tensor) -> Tensor:
    """Rows of x by index, without padding rows."""
    return x if index is None else x[index[: int(offs[-1])]]


def _scaled(bias: Tensor, probs: Tensor | None, start: int, end: int) -> Tensor:
    """A bias times the probabilities of a range of rows."""
    return upcast(bias) if probs is None else upcast(bias) * upcast(probs[start:end, None])


def _group_tiles(offs: Tensor, rows: int) -> Tensor:
    sizes = offs.diff(prepend=offs.new_zeros(1))
    table = [sizes.sort(descending=True, stable=True).indices]
    counts = []
    for block in (64, 128, 256):
        entries = [
            group | row_block << 11
            for group, size in enumerate(sizes.tolist())
            for row_block in range(-(-size // block))
        ]
        unused = [0] * (rows // block + len(offs) - len(entries))
        table.append(offs.new_tensor(entries + unused))
        counts.append(len(entries))
    head, last = offs.new_tensor(counts).split([2, 1])
    return torch.cat([head, *table, last]).to(torch.int32)


def _grouped_mm(p: Product) -> Tensor:
    bounds, x, weight = bounds_of(p.offs), _gathered(p.x, p.index, p.offs), p.weight
    if p.bias is None:
        parts = [x[start:end] @ weight[e].t() for e, (start, end) in enumerate(bounds)]
    else:
        biases = [_scaled(p.bias[e], p.probs, start, end) for e, (start, end) in enumerate(bounds)]
        parts = [
            (upcast(x[start:end]) @ upcast(weight[e]).t() + biases[e]).to(x.dtype)
            for e, (start, end) in enumerate(bounds)
        ]
    padding = x.new_zeros(p.rows - bounds[-1][1], weight.shape[1])
    return torch.cat([*parts, padding])


def _grouped_mm_into(y: Tensor, p: Product) -> None:
    y.copy_(_grouped_mm(p))


def _grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> Tensor:
    dy, x = _gathered(dy, dy_index, offs), _gathered(x, x_index, offs)
    return torch.stack([dy[start:end].t() @ x[start:end] for start, end in bounds_of(offs)])


def _grouped_wgrad_into(g: Gradient) -> None:
    dy, x = g.dy.to(g.dw.dtype), g.x.to(g.dw.dtype)
    add_or_write(g.dw, _grouped_wgrad(dy, x, g.offs, None, g.dy_index, g.x_index), g.accumulate)


def add_or_write(total: Tensor, part: Tensor, accumulate: bool) -> None:
    """total += part, or = part."""
    if accumulate:
        total += part
    else:
        total.copy_(part)


MAX_GROUPS = 1 << 11


def _tiles_fake(offs: Tensor, rows: int) -> Tensor:
    return offs.new_empty(table_size(rows, len(offs)))


def _output(p: Product) -> Tensor:
    return p.x.new_empty(p.rows, p.weight.shape[1])


def _wgrad_fake(dy: Tensor, x: Tensor, offs: Tensor, *_: Any) -> Tensor:
    return x.new_empty(offs.shape[0], dy.shape[1], x.shape[1])


def _mm_flops(p: Product) -> int:
    """The FLOPs of all rows, padding included, since offs is not read."""
    return 2 * p.rows * p.x.shape[1] * p.weight.shape[1]


def _wgrad_flops(dy: Tensor, x: Tensor, offs: Tensor, tiles: Any = None, *index: Any) -> int:
    return _add_flops(Gradient(_wgrad_fake(dy, x, offs), dy, x, offs, tiles, False, *index))


def _add_flops(g: Gradient) -> int:
    return 2 * g.rows * g.dw[0].numel()


def _tiles_cases() -> Cases:
    yield from ((ints(groups), 65536) for groups in (8, 32, 64, 128, 1024))


def _mm_cases() -> Cases:
    groups, rows, n, k = 8, 16384, 4096, 2048
    offs, tiles = ints(groups), ints(table_size(rows, groups))
    for dtype in FLOATS:
        x, w = on_meta(rows, k, dtype=dtype), on_meta(groups, n, k, dtype=dtype)
        yield x, w, offs, tiles
        yield x, on_meta(groups, k, n, dtype=dtype).transpose(1, 2), offs, tiles
        if dtype.itemsize == 2:
            tokens, index = on_meta(rows // 2, k, dtype=dtype), ints(rows)
            narrow = on_meta(groups, n // 2, k, dtype=dtype)
            yield tokens, narrow, offs, tiles, None, index
            narrow = on_meta(groups, k, n // 2, dtype=dtype).transpose(1, 2)
            yield tokens, narrow, offs, tiles, None, index
            bias = on_meta(groups, n, dtype=dtype)
            yield x, w, offs, tiles, bias
            yield x, w, offs, tiles, bias, None, floats(rows)
    x, w, bias = on_meta(rows, k + 32), on_meta(groups, n, k + 32), on_meta(groups, n)
    yield x, w, offs, tiles
    yield x, w, offs, tiles, bias
    yield x, on_meta(groups, k + 32, n).transpose(1, 2), offs, tiles
    yield on_meta(rows, 33), on_meta(groups, 65, 33), offs, tiles


def _into_cases() -> Cases:
    """One: the kernels are those of `grouped_mm`."""
    x, weight, *rest = next(_mm_cases())
    yield x.new_empty(len(x), weight.shape[1]), x, weight, *rest


def _wgrad_cases() -> Cases:
    groups, rows, n, k = 8, 16384, 4096, 2048
    offs, tiles = ints(groups), ints(table_size(rows, groups))
    index = ints(rows)
    for dtype in FLOATS:
        wide, narrow = on_meta(rows, n, dtype=dtype), on_meta(rows, k, dtype=dtype)
        yield wide, narrow, offs, tiles
        if dtype.itemsize == 2:
            tokens = on_meta(rows // 2, k, dtype=dtype)
            yield narrow, wide, offs, tiles
            yield tokens, narrow, offs, tiles, index
            yield narrow, tokens, offs, tiles, None, index
    yield on_meta(rows, 65), on_meta(rows, 33), offs, tiles


def _few_cases() -> Cases:
    """Groups of a few rows, whose weight gradients have their own kernel."""
    groups, rows, n, k = 8, 64, 4096, 2048
    offs, tiles = ints(groups), ints(table_size(rows, groups))
    index = ints(rows)
    for dtype in (torch.bfloat16, torch.float16):
        dy, x = on_meta(rows, n, dtype=dtype), on_meta(rows, k, dtype=dtype)
        yield dy, x, offs, tiles
        yield dy, x, offs, tiles, index
        yield dy, x, offs, tiles, None, index


def _add_cases() -> Cases:
    for number, (dy, x, offs, tiles, *index) in enumerate(_wgrad_cases()):
        main_grad = floats(len(offs), dy.shape[1], x.shape[1])
        yield main_grad, dy, x, offs, tiles, True, *index
        if number < 4:
            yield main_grad, dy, x, offs, tiles, False, *index


gemm_op = functools.partial(kernel_op, traces_twin=False)
"""Registers an op whose twin reads values (a loop over groups), or loops over as many chunks as there are rows."""


@gemm_op(twin=_group_tiles, fake=_tiles_fake, cases=_tiles_cases)
def group_tiles(offs: Tensor, rows: int) -> Tensor:
    """The tile table of `rows` rows in groups that end at `offs`: pass it to every GEMM over them.

    int32: the number of row blocks of 64, and of 128; the groups by falling size; then one entry
    (group | row block in the group << 11) for each row block of 64, up to its bound R // 64 + E,
    the same for 128 and for 256, unused entries zero; the number of row blocks of 256.
    """
    offs, groups = offs.contiguous(), groups_of(offs)
    tiles = offs.new_empty(table_size(rows, groups))
    launch(
        device("grouped_mm").group_tiles_kernel, (groups,), offs, tiles, rows, groups,
        BLOCK_E=pow2(groups), num_warps=4,
    )  # fmt: skip
    return tiles


def groups_of(offs: Tensor) -> int:
    """The number of groups of offs. Raises FuseOpsError for offs that no tile table can be made of."""
    if offs.dim() != 1 or not 0 < len(offs) <= MAX_GROUPS or offs.dtype != torch.int32:
        raise FuseOpsError(
            f"offs is {offs.dtype}{tuple(offs.shape)}, expected int32 (E,) with 1 to {MAX_GROUPS} groups."
        )
    return len(offs)


def one_group(rows: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """(offs, tile table) of all rows as one group, on the device of `like`: for GEMMs that are not grouped.

    Both are cached by stream for repeated calls. Traced, observed or captured code gets new offs and no table.
    """
    if not thread.replay_mode or (like.is_cuda and torch_private.is_capturing()):
        return _one_group_offs(rows, like.device), None
    where = like.device
    stream = torch_private.current_stream(where.index)[0] if like.is_cuda else 0
    kept = _cached_group(rows, where, stream)
    if thread.replay_mode is not True:  # a Transcriber records
        thread.replay_mode.keep(*kept)
    return kept


@functools.lru_cache(maxsize=256)
def _cached_group(rows: int, where: torch.device, stream: int) -> tuple[Tensor, Tensor | None]:
    with torch.inference_mode(False):
        offs = _one_group_offs(rows, where)
        launches = group_tiles.launches((offs, rows), {})  # the twin would read offs
        return offs, group_tiles(offs, rows) if launches else None


def _one_group_offs(rows: int, where: torch.device) -> Tensor:
    return torch.full((1,), rows, dtype=torch.int32, device=where)


@gemm_op(twin=_grouped_mm, fake=_output, flops=_mm_flops, cases=_mm_cases)
@of_fields(Product)
def grouped_mm(p: Product) -> Tensor:
    """x[rows of e] @ weight[e].T + bias[e] (* probs), padding rows zero.   -> (R, N)"""
    p, y = checked_product(p), _output(p)
    launch_mm(p, y)
    return y


@gemm_op(
    twin=_grouped_mm_into,
    flops=lambda y, *product: _mm_flops(Product(*product)),
    mutates=("y",),
    cases=_into_cases,
)
@of_fields(Product)
def grouped_mm_into(y: Tensor, p: Product) -> None:
    """Write `grouped_mm` to y (R, N), contiguous and of the dtype of x, by the same kernels."""
    p, dtype = checked_product(p), p.x.dtype
    shape = p.rows, p.weight.shape[1]
    if y.shape != shape or y.dtype != dtype or not y.is_contiguous():
        raise FuseOpsError(
            f"y is {y.dtype}{tuple(y.shape)} with strides {y.stride()}, expected contiguous {dtype} {shape}."
        )
    launch_mm(p, y)


def checked_product(p: Product) -> Product:
    """The operands as `launch_mm` takes them. Raises FuseOpsError for invalid ones."""
    axes = "x (T, K), weight (E, N, K), bias (E, N), probs (R,) float32, index (R,) int, offs (E,) int32"
    check_spec(vars(p), axes, R=p.rows)
    _check_dtypes(p.x, p.weight)
    weight = p.weight if 1 in p.weight.stride()[1:] else p.weight.contiguous()
    rest = [t if t is None else t.contiguous() for t in (p.bias, p.index, p.probs)]
    return Product(as_rows(p.x), weight, *checked_groups(p.offs, p.tiles, p.rows), *rest)


@gemm_op(
    twin=_grouped_wgrad,
    fake=_wgrad_fake,
    flops=_wgrad_flops,
    cases=lambda: chain(_wgrad_cases(), _few_cases()),
)
def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> Tensor:
    """dy[rows of e].T @ x[rows of e] in the dtype of x.   (R, N), (R, K), (E,) int32 -> (E, N, K)

    dy_index, x_index: (R,) int32 or int64: row r of that operand is its row index[r].
    """
    dw = x.new_empty(offs.numel(), dy.shape[-1], x.shape[-1])
    launch_wgrad(_checked_gradient(Gradient(dw, dy, x, offs, tiles, False, dy_index, x_index)))
    return dw


@gemm_op(twin=_grouped_wgrad_into, flops=_add_flops, mutates=("dw",), cases=_add_cases)
@of_fields(Gradient)
def grouped_wgrad_into(g: Gradient) -> None:
    """Add `grouped_wgrad` to the float32 dw (E, N, K), a main_grad, unrounded, or overwrite it."""
    if g.dw.dtype != torch.float32 or not g.dw.is_contiguous():
        raise FuseOpsError(
            f"main_grad is {g.dw.dtype} with strides {g.dw.stride()}, expected a contiguous float32 buffer."
        )
    launch_wgrad(_checked_gradient(g))


def _checked_gradient(g: Gradient) -> Gradient:
    """The operands as `launch_wgrad` takes them. Raises FuseOpsError for invalid ones."""
    axes = "dy (S, N), x (T, K), dy_index (R,) int, x_index (R,) int, offs (E,) int32, dw (E, N, K)"
    check_spec(vars(g), axes, R=g.rows, **({"T": g.rows} if g.x_index is None else {}))
    _check_dtypes(g.x, g.dy)
    groups = checked_groups(g.offs, g.tiles, g.rows)
    index = [t if t is None else t.contiguous() for t in (g.dy_index, g.x_index)]
    return Gradient(g.dw, as_rows(g.dy), as_rows(g.x), *groups, g.accumulate, *index)


def _check_dtypes(x: Tensor, other: Tensor) -> None:
    if x.dtype not in FLOATS or other.dtype != x.dtype:
        raise FuseOpsError(
            f"operands are {x.dtype} and {other.dtype}, expected one dtype of bfloat16, float16, float32."
        )


def checked_groups(offs: Tensor, tiles: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """(offs, tile table), which is computed if the caller has none."""
    tiles = group_tiles(offs, rows) if tiles is None else tiles
    if tiles.shape != (table_size(rows, len(offs)),) or tiles.dtype != torch.int32:
        raise FuseOpsError(
            f"tiles is {tiles.dtype}{tuple(tiles.shape)}, expected group_tiles(offs, {rows})."
        )
    return offs.contiguous(), tiles.contiguous()


# --- derivatives of the registered ops, for code compiled under `fo.reference()`; eager autograd differentiates the
# twins' loop, which cannot be traced, since it reads `offs`


def _setup_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offs, tiles, bias, index, probs = inputs
    ctx.indexed = index is not None
    ctx.save_for_backward(x, weight, offs, tiles, None if probs is None else bias, probs)
    ctx.bias = None if bias is None else bias.dtype


def _mm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_indexed(ctx)
    x, weight, offs, tiles, scaled, probs = ctx.saved_tensors
    wants_x, wants_weight, _, *rest = ctx.needs_input_grad  # arguments left out are not in it
    dx = grouped_mm.op(dy, weight.transpose(1, 2), offs, tiles) if wants_x else None
    dw = grouped_wgrad.op(dy, x, offs, tiles) if wants_weight else None
    dbias = dprobs = None
    if True in rest[1:]:  # of a bias, or of what scales it
        dbias, dots = grouped_bias_bwd(dy, offs, probs, scaled)
        dbias, dprobs = dbias.to(ctx.bias), None if probs is None else dots
    return dx, dw, None, None, dbias, None, dprobs


def _setup_wgrad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, x, offs, tiles, dy_index, x_index = inputs
    ctx.indexed = not (dy_index is None and x_index is None)
    ctx.save_for_backward(dy, x, offs, tiles)


def _wgrad_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_indexed(ctx)
    dy, x, offs, tiles = ctx.saved_tensors
    wants_dy, wants_x, *_ = ctx.needs_input_grad
    ddy = grouped_mm.op(x, d, offs, tiles) if wants_dy else None
    dx = grouped_mm.op(dy, d.transpose(1, 2), offs, tiles) if wants_x else None
    return ddy, dx, None, None, None, None


def _refuse_indexed(ctx: Any) -> None:
    """Raise FuseOpsError in the backward, since torch.export traces forwards of parameters that want gradients."""
    if ctx.indexed:
        raise FuseOpsError(
            "a grouped GEMM with an index has no derivative: gather the rows first (kernels.gather_rows)."
        )


torch.library.register_autograd(grouped_mm.label, _mm_backward, setup_context=_setup_mm)
torch.library.register_autograd(grouped_wgrad.label, _wgrad_backward, setup_context=_setup_wgrad)
