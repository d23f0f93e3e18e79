"""What `memory_bound.py` measures: every memory-bound kernel, its arguments, and the peers that do the
same work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels import (
    activation,
    amax,
    bias,
    dropout,
    norm,
    permute,
    quantize,
    rope,
    router,
    routing,
)
from fuseops.kernels.registry import KernelOp

from .measure import rnd

E4M3 = torch.float8_e4m3fn
SHAPES = ((8192, 4096), (65536, 2048))
MOE = {
    (32768, 2048): (128, 8),
    (32768, 4096): (64, 4),
    (8192, 4096): (8, 2),
    (24576, 1536): (128, 8),
}
"""(tokens, columns): (experts, k)."""
EXPERTS = 64
Call = Callable[..., Any]


class Case(NamedTuple):
    """One kernel: arguments for (rows, columns), and the peers that do the same work on the same
    arguments. torch.compile is given the kernel's twin, or `compiled` where it would not do itself justice with that.
    """

    name: str
    op: KernelOp
    make: Callable[[int, int], tuple]
    eager: Call | None = None
    liger: Callable[[], Call] | None = None
    tail: tuple = ()
    shapes: tuple[tuple[int, int], ...] = SHAPES
    compiled: Call | None = None


def x(r: int, n: int) -> tuple:
    return (rnd(r, n),)


def wide(r: int, n: int) -> tuple:
    return (rnd(r, 2 * n),)


def dy_x(r: int, n: int) -> tuple:
    return rnd(r, n), rnd(r, n)


def dy_wide(r: int, n: int) -> tuple:
    return rnd(r, n), rnd(r, 2 * n)


def probs(r: int) -> Tensor:
    return torch.rand(r, device="cuda")


def offs(r: int) -> Tensor:
    cuts = torch.randint(0, r, (EXPERTS - 1,)).sort().values
    return torch.cat([cuts, torch.tensor([r])]).to("cuda", torch.int32)


def liger(module: str, name: str, adapted: Callable[[Call], Call]) -> Callable[[], Call]:
    """What gives a kernel of Liger-Kernel, to be called as ours is."""
    return lambda: adapted(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name))


liger_swiglu = liger("swiglu", "swiglu_fused_gate_up_forward", lambda f: lambda x, *_: f(x))
liger_swiglu_bwd = liger(
    "swiglu", "swiglu_fused_gate_up_backward", lambda f: lambda dy, x, *_: f(x, dy)
)
liger_rmsnorm = liger(
    "rms_norm", "rms_norm_forward",
    lambda f: lambda x, w, eps: f(x, w, eps, 0.0, "gemma", None)[:3:2],
)  # fmt: skip
liger_add_rmsnorm = liger(
    "fused_add_rms_norm", "fused_add_rms_norm_forward",
    lambda f: lambda x, r, w, eps: f(x, r, w, eps, 0.0, "gemma")[:3],
)  # fmt: skip
liger_layernorm = liger(
    "layer_norm", "layer_norm_forward", lambda f: lambda x, w, b, eps: f(x, w, b, eps)[0]
)
liger_layernorm_bwd = liger(
    "layer_norm", "layer_norm_backward",
    lambda f: lambda dy, x, w, mean, rstd, *_: f(dy, x, w, w, mean, rstd),
)  # fmt: skip


def liger_rmsnorm_bwd() -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    def call(dy, x, w, rstd, *_):
        block, warps = calculate_settings(x.shape[1])
        return rms_norm_backward(dy, x, w, rstd, 0.0, 1, block, warps, False, None)

    return call


def norm_args(r: int, n: int) -> tuple:
    return rnd(r, n), rnd(n), 1e-6


def add_norm_args(r: int, n: int) -> tuple:
    return rnd(r, n), rnd(r, n), rnd(n), 1e-6


def norm_bwd_args(r: int, n: int) -> tuple:
    return rnd(r, n), rnd(r, n), rnd(n), torch.rand(r, device="cuda") + 0.5


def eager_rmsnorm_bwd(dy, x, w, rstd, *_):
    return torch.ops.aten._fused_rms_norm_backward(
        dy, x, [x.shape[1]], rstd[:, None], w, [True, True]
    )


def gelu(x: Tensor, *_: Any) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_bwd(dy: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


def swiglu(x: Tensor, *_: Any) -> Tensor:
    gate, linear = x.chunk(2, -1)
    return F.silu(gate) * linear


def scaled_swiglu(x: Tensor, p: Tensor, *_: Any) -> Tensor:
    return (swiglu(x) * p[:, None]).to(x.dtype)


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def add_rmsnorm(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, w.shape, w, eps), h


def add_layernorm(x: Tensor, r: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.layer_norm(h, [x.shape[1]], w, b, eps), h


def layernorm_bwd_args(r: int, n: int) -> tuple:
    x = rnd(r, n)
    return rnd(r, n), x, rnd(n), x.float().mean(1), 1 / x.float().std(1)


def eager_layernorm_bwd(dy, x, w, mean, rstd, *_):
    size = [x.shape[1]]
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, size, mean[:, None], rstd[:, None], w, w, [True, True, True]
    )


def heads_args(r: int, n: int) -> tuple:
    """Queries beside their keys and values."""
    return rnd(r, n * 3 // 2).view(r, -1, 128)[:, : n // 128], rnd(128), 1e-6


def rope_args(r: int, n: int) -> tuple:
    angles = torch.rand(r, 64, device="cuda")
    return rnd(r, n // 128, 128), angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Tensor:
    return turned(x, cos, -sin)


def block_cases() -> Iterator[Case]:
    """What stands between the GEMMs of a block."""
    ln, rms, eager_ln = norm, norm, lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps)
    args = lambda r, n: (rnd(r, n), rnd(n), rnd(n), 1e-5)  # noqa: E731
    yield Case("layernorm_fwd", ln.layernorm_fwd, args, eager_ln, liger_layernorm)
    bwd = ln.layernorm_bwd, layernorm_bwd_args, eager_layernorm_bwd, liger_layernorm_bwd
    yield Case("layernorm_bwd", *bwd)
    add_args = lambda r, n: (rnd(r, n), rnd(r, n), rnd(n), rnd(n), 1e-5)  # noqa: E731
    yield Case("add_layernorm_fwd", ln.add_layernorm_fwd, add_args, add_layernorm)
    residual = lambda r, n: (*layernorm_bwd_args(r, n), rnd(r, n))  # noqa: E731
    yield Case("add_layernorm_bwd", ln.layernorm_bwd, residual)
    seeded = lambda r, n: (rnd(r, n), torch.randint(2**62, (1,), device="cuda"))  # noqa: E731
    plain = lambda x, seed, p: F.dropout(x, p)  # noqa: E731
    yield Case("dropout", dropout.apply_dropout, seeded, plain, tail=(0.1,), compiled=plain)
    halves, back = (False,), (False, True)
    yield Case("rope_fwd", rope.apply_rope, rope_args, turned, tail=halves, compiled=turned)
    yield Case("rope_bwd", rope.apply_rope, rope_args, turned_back, tail=back, compiled=turned_back)
    neighbours = (True,)
    yield Case("rope_interleaved", rope.apply_rope, rope_args, tail=neighbours)
    yield Case("qk_rmsnorm_fwd", rms.rmsnorm_fwd, heads_args, rmsnorm)


def with_probs(make: Callable[[int, int], tuple]) -> Callable[[int, int], tuple]:
    return lambda r, n: (*make(r, n), probs(r))


def activation_cases() -> Iterator[Case]:
    a = activation
    silu, silu_bwd = (
        (lambda x, *_: F.silu(x)),
        (lambda dy, x, *_: torch.ops.aten.silu_backward(dy, x)),
    )
    yield Case("silu_fwd", a.act_fwd, x, silu, tail=("silu",))
    yield Case("silu_bwd", a.act_bwd, dy_x, silu_bwd, tail=("silu",))
    yield Case("gelu_fwd", a.act_fwd, x, gelu, tail=("gelu_tanh",))
    yield Case("gelu_bwd", a.act_bwd, dy_x, gelu_bwd, tail=("gelu_tanh",))
    yield Case("srelu_fwd", a.act_fwd, x, lambda x, _: F.relu(x).square(), tail=("srelu",))
    yield Case("srelu_bwd", a.act_bwd, dy_x, tail=("srelu",))
    yield Case("swiglu_fwd", a.act_fwd, wide, swiglu, liger_swiglu, ("swiglu",))
    yield Case("swiglu_bwd", a.act_bwd, dy_wide, None, liger_swiglu_bwd, ("swiglu",))
    yield Case("clamped_swiglu_bwd", a.act_bwd, dy_wide, tail=("clamped_swiglu",))
    yield Case("interleaved_swiglu_bwd", a.act_bwd, dy_wide, tail=("swiglu", 32))
    yield Case("swiglu_bwd_bias", a.act_bwd_bias, dy_wide, tail=("swiglu",))
    yield Case("gelu_bwd_bias", a.act_bwd_bias, dy_x, tail=("gelu_tanh",))
    scaled_bwd, args = a.scaled_act_bwd, with_probs(dy_wide)
    yield Case(
        "scaled_swiglu_fwd", a.scaled_act_fwd, with_probs(wide), scaled_swiglu, tail=("swiglu",)
    )
    yield Case("scaled_swiglu_bwd", scaled_bwd, args, tail=("swiglu",))
    yield Case("scaled_swiglu_bwd_y", scaled_bwd, args, tail=("swiglu", True, True))


def logits(r: int, n: int) -> tuple:
    return rnd(r, MOE[r, n][0], dtype=torch.float32), MOE[r, n][1]


def chosen(r: int, n: int) -> tuple:
    weights, experts = logits(r, n)[0].topk(MOE[r, n][1])
    return experts.to(torch.int32), MOE[r, n][0], weights


def routed(r: int, n: int) -> tuple[Tensor, ...]:
    """(offs, index, pos, probs) of random choices."""
    return routing.route(*chosen(r, n))


def scatter_args(r: int, n: int) -> tuple:
    offs, index, pos, _ = routed(r, n)
    return rnd(r, n), pos, offs, len(index)


def gather_args(r: int, n: int) -> tuple:
    offs, index, *_ = routed(r, n)
    return rnd(r, n), index, offs


def combine_args(r: int, n: int) -> tuple:
    offs, index, pos, probs = routed(r, n)
    return rnd(len(index), n), pos, offs, probs


def router_bwd_args(r: int, n: int) -> tuple:
    scores, k = logits(r, n)
    return rnd(r, k, dtype=torch.float32), scores, scores.topk(k).indices.to(torch.int32)


def router_bwd_chosen_args(r: int, n: int) -> tuple:
    """As a layer calls it: the logits of the chosen are enough, and dlogits are an operand."""
    experts, num_experts, scores = chosen(r, n)
    return (
        torch.rand_like(scores),
        scores,
        experts,
        "softmax",
        True,
        1.0,
        num_experts,
        torch.bfloat16,
    )


def scatter(x: Tensor, pos: Tensor, offs: Tensor, rows: int) -> Tensor:
    y = x.new_empty(rows, x.shape[1])
    return y.index_copy_(0, pos.flatten().long(), x.repeat_interleave(pos.shape[1], 0))


def combine(x: Tensor, pos: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    pos = pos.long()
    y = x[pos] if probs is None else x[pos] * probs[pos][:, :, None]
    return y.sum(1).to(x.dtype)


def topk_softmax(logits: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
    top = torch.softmax(logits, -1).topk(k)
    return top.values / top.values.sum(-1, keepdim=True), top.indices


def moe_cases() -> Iterator[Case]:
    p, moe = permute, tuple(MOE)
    gather = lambda x, index, _: x.index_select(0, index)  # noqa: E731
    plain = lambda r, n: combine_args(r, n)[:3]  # noqa: E731
    soft = ("softmax", True)
    yield Case("scatter_rows", p.scatter_rows, scatter_args, scatter, shapes=moe)
    yield Case("gather_rows", p.gather_rows, gather_args, gather, shapes=moe)
    yield Case("combine_plain", p.combine_fwd, plain, combine, shapes=moe)
    yield Case("combine_fwd", p.combine_fwd, combine_args, combine, shapes=moe)
    yield Case("route", routing.route, chosen, shapes=moe)
    yield Case("router_fwd", router.router_fwd, logits, topk_softmax, tail=soft, shapes=moe)
    yield Case("router_bwd", router.router_bwd, router_bwd_args, tail=soft, shapes=moe)
    yield Case("router_bwd_chosen", router.router_bwd, router_bwd_chosen_args, shapes=moe)


def cases() -> Iterator[Case]:
    b, q = bias, quantize
    yield from activation_cases()
    yield Case("bias_fwd", b.bias_fwd, lambda r, n: (rnd(r, n), rnd(n)), torch.add)
    yield Case("bias_bwd", b.bias_bwd, x, lambda dy: dy.sum(0, dtype=torch.float32))
    group_bias = lambda r, n: (rnd(r, n), rnd(EXPERTS, n), offs(r))  # noqa: E731
    group_dbias = lambda r, n: (rnd(r, n), offs(r))  # noqa: E731
    group_both = lambda r, n: (rnd(r, n), offs(r), probs(r), rnd(EXPERTS, n))  # noqa: E731
    yield Case("grouped_bias_fwd", b.grouped_bias_fwd, group_bias)
    yield Case("grouped_bias_bwd", b.grouped_bias_bwd, group_dbias)
    yield Case("grouped_bias_bwd_dprobs", b.grouped_bias_bwd, group_both)
    yield Case("rmsnorm_fwd", norm.rmsnorm_fwd, norm_args, rmsnorm, liger_rmsnorm)
    yield Case(
        "add_rmsnorm_fwd", norm.add_rmsnorm_fwd, add_norm_args, add_rmsnorm, liger_add_rmsnorm
    )
    yield Case("rmsnorm_bwd", norm.rmsnorm_bwd, norm_bwd_args, eager_rmsnorm_bwd, liger_rmsnorm_bwd)
    yield Case("add_rmsnorm_bwd", norm.rmsnorm_bwd, lambda r, n: (*norm_bwd_args(r, n), rnd(r, n)))
    yield from block_cases()
    yield Case("quantize_vectors", q.quantize_vectors, x, tail=(E4M3,))
    yield Case("quantize_groups", amax.quantize_groups, x, tail=(None, E4M3, True, True))
    yield Case("quantize_group_blocks", q.quantize_group_blocks, group_dbias, tail=(E4M3,))
    yield from moe_cases()
