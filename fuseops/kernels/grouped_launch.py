"""`launch_mm` and `launch_wgrad` launch grouped GEMMs: they choose the kernel, tiles and descriptors.

The third launch with operands of one kind, and later ones, are replayed without this code (`replay`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.activation import GATES, Form, shape_constants
from fuseops.kernels.configs import Config
from fuseops.kernels.grouped_paths import MM_SPACES, WGRAD_SPACES, mm_choice, wgrad_choice
from fuseops.kernels.launch import device, launch, num_sms, pdl_overlap
from fuseops.kernels.permute import gather_rows
from fuseops.kernels.records import Arguments
from fuseops.kernels.replay import not_replayable
from fuseops.kernels.tiles import cdiv

TILE_ROWS = (64, 128, 256)  # the row blocks in a tile table


@dataclass
class Product(Arguments):
    """A `Product` has the operands of a grouped GEMM: x[rows of e] @ weight[e].T + bias[e] of groups ending at offs.

    x       (R, K), any number of rows with an index; launched with contiguous columns
    weight  (E, N, K); launched with a contiguous axis 1 or 2
    tiles   `group_tiles(offs, R)`, made where none is given
    index   (R,) int32 or int64: row r of the operand is x[index[r]]
    probs   (R,) float32, multiply the activation that the product ends in, or else the bias
    """

    x: Tensor
    weight: Tensor
    offs: Tensor
    tiles: Tensor | None = None
    bias: Tensor | None = None
    index: Tensor | None = None
    probs: Tensor | None = None

    @property
    def rows(self) -> int:
        """R, the rows of the product."""
        return (self.x if self.index is None else self.index).shape[0]

    def gathered(self) -> Product:
        """The same with gathered rows, without an index."""
        if self.index is None:
            return self
        return replace(self, x=gather_rows.launcher(self.x, self.index, self.offs), index=None)


def launch_mm(p: Product, y: Tensor) -> None:
    """Write x[rows of e] @ weight[e].T + bias[e] (* probs) to y (R, N)."""
    if p.bias is None and p.probs is not None:
        raise FuseOpsError("probs multiply the bias, and none was given.")
    if not y.numel():
        return
    path = "pointer" if y.data_ptr() % 16 else mm_choice(p.x, p.weight, p.index).path
    if p.index is not None and path != "gather":
        launch_mm(p.gathered(), y)
        return
    config = MM_SPACES[path].pick(p.rows, tuple(p.weight.shape), p.x)
    if path in ("gather", "pingpong"):
        launch_rings(p, path, config, y)
    else:
        _launch_triton(p, path, config, y)


def launch_rings(
    p: Product,
    path: str,
    config: Config,
    y: Tensor,
    *,
    form: Form = ("", 0),
    act: Tensor | None = None,
    h: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Launch the Gluon kernel, with the tensors of its epilogue besides y (R, N).

    act: the activation `form` of the product, which is itself written unless y is act; with h, the pre-activation whose
    activation the product is the gradient of, y becomes that of h, act its activation, and sums (blocks of columns, R)
    the parts of the gradient of probs.
    """
    module, transposed = device("grouped_pingpong"), p.weight.stride(2) != 1
    kind, interleave, *options = form
    halves = kind in GATES and h is None and not interleave
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    config = {"SLOTS": 0, "PART": block_m // (1 + config["COOPERATIVE"]), "BOX": block_m, **config}
    x_block = [config.pop("BOX"), 64]
    y_block = [config.pop("PART"), 64]
    groups, n, k = p.weight.shape
    inner = n if transposed else k
    x_operand, index = p.x, p.index
    if index is None:
        x_operand = module.Descriptor(p.x, p.x.shape, p.x.stride(), x_block)
        index = p.offs
    w_block = [64 if transposed else block_n // (1 + halves), 64]
    w_desc = module.Descriptor(p.weight, (groups * n * k // inner, inner), (inner, 1), w_block)
    y_desc = module.Descriptor(y, y.shape, y.stride(), y_block)
    h_desc = y_desc if h is None else module.Descriptor(h, h.shape, h.stride(), y_block)
    grid, sizes = _sizes(p, config, 1)
    given = [y if t is None else t for t in (p.bias, act, p.probs)]
    launch(
        module.grouped_mm_pingpong_kernel, grid, y, x_operand, index, w_desc, y_desc, *given, h_desc,
        given[-1] if sums is None else sums, p.offs, p.tiles, *sizes,
        GATHER=path == "gather", TRANSPOSED=transposed, HAS_BIAS=p.bias is not None,
        ACT=kind, INTERLEAVED=interleave == 1, **shape_constants(kind, *options),
        HAS_PROBS=p.probs is not None, NEED_Y=y is not act, **config, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _launch_triton(p: Product, path: str, config: Config, y: Tensor) -> None:
    """Launch the Triton kernel, with descriptors ("tma") or pointers."""
    module, transposed = device("grouped_mm"), p.weight.stride(2) != 1
    config = dict(config)
    grid, sizes = _sizes(p, config, config.pop("PER_SM"))
    operands: tuple[Any, ...] = (p.x, p.weight, y)
    if path == "tma":
        block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        weight, w_block = p.weight, [1, block_n, block_k]
        if transposed:
            weight, w_block = p.weight.transpose(1, 2), [1, block_k, block_n]
        operands = (
            module.describe(p.x, [block_m, block_k]),
            module.describe(weight, w_block),
            module.describe_ragged(y, [block_m, block_n // config["SUBTILES"]]),
        )
    launch(
        module.grouped_mm_kernel, grid, y, *operands, y if p.bias is None else p.bias,
        y if p.probs is None else p.probs, p.offs, p.tiles, *sizes, *p.weight.stride(),
        HAS_BIAS=p.bias is not None, HAS_PROBS=p.probs is not None, TRANSPOSED=transposed,
        TMA=path == "tma", PRECISION=precision(p.x), **config,
    )  # fmt: skip


def _sizes(p: Product, config: Config, per_sm: int) -> tuple[tuple[int], tuple[int, ...]]:
    """(the grid of a product, the size arguments of its kernels)."""
    (groups, n, k), block_m, rows = p.weight.shape, config["BLOCK_M"], p.rows
    num_n, most = cdiv(n, config["BLOCK_N"]), per_sm * num_sms(p.x.device)
    programs = min(most, (rows // block_m + groups) * num_n)
    return (programs,), (first_entry(rows, groups, block_m), rows, groups, n, k, p.x.stride(0))


@dataclass
class Gradient(Arguments):
    """A `Gradient` has the operands of a weight gradient: dy[rows of e].T @ x[rows of e], by index where one is given.

    dw     (E, N, K), which is overwritten or, with accumulate, added to
    tiles  `group_tiles(offs, R)`, made where none is given
    """

    dw: Tensor
    dy: Tensor
    x: Tensor
    offs: Tensor
    tiles: Tensor | None = None
    accumulate: bool = True
    dy_index: Tensor | None = None
    x_index: Tensor | None = None

    @property
    def rows(self) -> int:
        """R, the rows that are summed over."""
        return (self.dy if self.dy_index is None else self.dy_index).shape[0]

    @property
    def index(self) -> Tensor | None:
        """The index of dy or of x, where only one has an index."""
        return self.x_index if self.dy_index is None else self.dy_index

    def gathered(self) -> Gradient:
        """The same with the rows of one operand gathered: of x if it has an index, else of dy."""
        if self.x_index is not None:
            x = gather_rows.launcher(self.x, self.x_index, self.offs)
            return replace(self, x=x, x_index=None)
        if self.dy_index is not None:
            dy = gather_rows.launcher(self.dy, self.dy_index, self.offs)
            return replace(self, dy=dy, dy_index=None)
        return self


def launch_wgrad(g: Gradient) -> None:
    """Write or add the weight gradient to dw."""
    if not g.rows or not g.dw.numel():
        if not g.accumulate:
            g.dw.zero_()
        return
    groups = len(g.dw) if g.dw.dtype.itemsize == 2 else None
    path = wgrad_choice(g.dy, g.x, g.dy_index, g.x_index, groups).path
    if path == "few":
        _launch_few(g)
        return
    if g.dy_index is not None and g.x_index is not None:
        g = g.gathered()
        path = wgrad_choice(g.dy, g.x, g.dy_index, g.x_index).path
    if g.dw.data_ptr() % 16:  # a slice of a larger buffer
        path = "pointer"
    if g.index is not None and path != "gather":
        launch_wgrad(g.gathered())
        return
    config = dict(WGRAD_SPACES[path].pick(g.rows, tuple(g.dw.shape), g.x))
    if path in ("gather", "pingpong"):
        _launch_wgrad_rings(g, path, config)
        return
    (groups, n, k), module = g.dw.shape, device("grouped_mm")
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    programs = groups * cdiv(n, block_m) * cdiv(k, block_n)
    grid = (min(config.pop("PER_SM") * num_sms(g.x.device), programs),)
    operands: tuple[Any, ...] = (g.dy, g.x, g.dw)
    if path == "tma":
        subtile = [1, block_m, block_n // config["SUBTILES"]]
        operands = (
            module.describe_ragged(g.dy, [block_k, block_m]),
            module.describe_ragged(g.x, [block_k, block_n]),
            g.dw if g.accumulate else module.describe(g.dw, subtile),
        )
    launch(
        module.grouped_wgrad_kernel, grid, g.dw, *operands, g.offs, g.tiles, g.rows, groups, n, k,
        g.dy.stride(0), g.x.stride(0),
        ACCUMULATE=g.accumulate, TMA=path == "tma", PRECISION=precision(g.x), **config,
    )  # fmt: skip


def _launch_wgrad_rings(g: Gradient, path: str, config: Config) -> None:
    """Launch the Gluon kernel of weight gradients."""
    module, sums = device("grouped_wgrad_pingpong"), g.dw.dtype == torch.float32
    groups, n, k = g.dw.shape
    # the gathered operand is the left one; otherwise the wider one the right, whose tiles are wide,
    # but parts of float32 are not transposed
    swap = n > k and not sums if path == "pingpong" else g.x_index is not None
    (a, b), (m, width) = ((g.x, g.dy), (k, n)) if swap else ((g.dy, g.x), (n, k))
    config = {"BLOCK_K": 64, "STORES": 1 + config["COOPERATIVE"], **config}
    a_operand, index, b_desc = a, g.index, module.describe_rows(b, config["BLOCK_K"])
    if index is None:
        a_operand, index = module.describe_rows(a, config["BLOCK_K"]), g.offs
    dw_desc = (
        module.describe_sums(g.dw, 32 if swap else 64) if sums else module.describe_weight(g.dw)
    )
    programs = groups * cdiv(m, config["BLOCK_M"]) * cdiv(width, 256)
    launch(
        module.grouped_wgrad_pingpong_kernel, (min(num_sms(g.x.device), programs),),
        g.offs, g.tiles, dw_desc, a_operand, index, b_desc, g.rows, groups, m, width, a.stride(0),
        GATHER=path == "gather", TRANSPOSED=swap, ACCUMULATE=g.accumulate, **config,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


def _launch_few(g: Gradient) -> None:
    """Launch the kernel of groups of a few rows, which reads both operands by index if they have one."""
    groups, n, k = g.dw.shape
    config = WGRAD_SPACES["few"].pick(g.rows, (groups, n, k), g.x)
    launch(
        device("grouped_few").grouped_wgrad_few_kernel,
        (groups * cdiv(n, config["BLOCK_M"]) * config["SPLITS"],),
        g.dw, g.dy, g.x, *(g.offs if index is None else index for index in (g.dy_index, g.x_index)),
        g.offs, g.rows, n, k, g.dy.stride(0), g.x.stride(0),
        DY_INDEXED=g.dy_index is not None, X_INDEXED=g.x_index is not None, ACCUMULATE=g.accumulate,
        PRECISION=precision(g.x), **pdl_overlap(g.dw.device), **config,
    )  # fmt: skip


def table_size(rows: int, groups: int) -> int:
    """Length of a tile table."""
    return 3 + 4 * groups + rows // 64 + rows // 128 + rows // 256


def first_entry(rows: int, groups: int, block_m: int) -> int:
    """The position of this row block's first entry in a tile table."""
    smaller = TILE_ROWS[: TILE_ROWS.index(block_m)]
    return 2 + groups + sum(rows // block + groups for block in smaller)


def count_place(rows: int, groups: int, block_m: int) -> int:
    """The position of the number of row blocks of this size in a tile table."""
    last = TILE_ROWS[-1]
    return table_size(rows, groups) - 1 if block_m == last else TILE_ROWS.index(block_m)


def precision(like: Tensor) -> str:
    """The precision of float32 products, by `torch.backends.cuda.matmul.allow_tf32`."""
    if like.dtype == torch.float32:
        not_replayable("a setting of torch")
    exact = like.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "ieee" if exact else "tf32"
