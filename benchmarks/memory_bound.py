"""Every memory-bound kernel beside torch.compile, Liger-Kernel and eager torch, as a share of copy
bandwidth.

    python benchmarks/memory_bound.py --out benchmarks/results/memory_bound_h200.json [--only
    rmsnorm] [--tune]

Bandwidth: candidates are captured into CUDA graphs over rotated buffers (together larger than L2,
so nothing is L2-hot) and replayed round robin, order rotated each round; medians. ``copy`` moves the
same bytes in the same run: the faster of an elementwise kernel and the driver's copy, which at some
sizes loses a third of the bandwidth. Small shapes: microseconds a call, eager on the host and under graph
replay. A case whose results differ from its reference is reported as wrong, without times.
``--tune`` first writes the fastest configurations of this GPU to the user's cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fuseops.kernels import (
    activation,
    bias,
    casts,
    configs,
    norm,
    permute,
    quantize,
    router,
    routing,
)
from fuseops.kernels.registry import KernelOp

E4M3 = torch.float8_e4m3fn
SHAPES = ((8192, 4096), (65536, 2048))
MOE = {
    (32768, 2048): (128, 8),
    (32768, 4096): (64, 4),
    (8192, 4096): (8, 2),
    (24576, 1536): (128, 8),
}
"""(tokens, columns): (experts, k)."""
SMALL_ROWS = (64, 1024)
SMALL_CASES = ("swiglu_fwd", "scaled_swiglu_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "quantize_rows")
FOOTPRINT = 400 << 20
EXPERTS = 64
Call = Callable[..., Any]


class Case(NamedTuple):
    """One kernel: arguments for (rows, columns), and the peers that do the same work on the same
    arguments.
    """

    name: str
    op: KernelOp
    make: Callable[[int, int], tuple]
    eager: Call | None = None
    liger: Callable[[], Call] | None = None
    tail: tuple = ()
    shapes: tuple[tuple[int, int], ...] = SHAPES


def rnd(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


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


def liger_swiglu() -> Call:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return lambda x, *_: swiglu_fused_gate_up_forward(x)


def liger_swiglu_bwd() -> Call:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return lambda dy, x, *_: swiglu_fused_gate_up_backward(x, dy)


def liger_rmsnorm() -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda x, w, eps: rms_norm_forward(x, w, eps, 0.0, "gemma", None)[:3:2]


def liger_add_rmsnorm() -> Call:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    return lambda x, r, w, eps: fused_add_rms_norm_forward(x, r, w, eps, 0.0, "gemma")[:3]


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


def combine_bwd_args(r: int, n: int) -> tuple:
    return rnd(r, n), *combine_args(r, n)


def router_bwd_args(r: int, n: int) -> tuple:
    scores, k = logits(r, n)
    return rnd(r, k, dtype=torch.float32), scores, scores.topk(k).indices.to(torch.int32)


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
    yield Case("combine_bwd", p.combine_bwd, combine_bwd_args, shapes=moe)
    yield Case("route", routing.route, chosen, shapes=moe)
    yield Case("router_fwd", router.router_fwd, logits, topk_softmax, tail=soft, shapes=moe)
    yield Case("router_bwd", router.router_bwd, router_bwd_args, tail=soft, shapes=moe)


def cast_cases() -> Iterator[Case]:
    c, bf16 = casts, torch.bfloat16
    f32 = lambda r, n: (rnd(r, n, dtype=torch.float32),)  # noqa: E731
    to = lambda x, dtype: x.to(dtype)  # noqa: E731
    both = lambda x, dtype, _: (x.to(dtype), x.t().to(dtype).contiguous())  # noqa: E731
    transpose = lambda x, *_: x.t().contiguous()  # noqa: E731
    yield Case("cast_down", c.cast, f32, to, tail=(bf16,))
    yield Case("cast_up", c.cast, x, to, tail=(torch.float32,))
    yield Case("transpose", c.cast_transpose, x, transpose, tail=(bf16, "col"))
    yield Case("cast_transpose", c.cast_transpose, f32, both, tail=(bf16, "both"))


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
    yield Case("quantize_tensor", q.quantize_tensor, x, tail=(E4M3, "row"))
    yield Case("quantize_tensor_both", q.quantize_tensor, x, tail=(E4M3, "both"))
    yield Case("quantize_rows", q.quantize_rows, x, tail=(E4M3,))
    for block in (1, 128):
        for layout in ("row", "col", "both"):
            name = f"quantize_{block}x128_{layout}"
            yield Case(name, q.quantize_blocks, x, tail=(E4M3, block, layout))
    yield Case("quantize_columns", q.quantize_columns, x, tail=(E4M3,))
    yield Case("quantize_group_blocks", q.quantize_group_blocks, group_dbias, tail=(E4M3,))
    yield from moe_cases()
    yield from cast_cases()


def candidates(case: Case) -> dict[str, Call | str]:
    """Name -> call on the arguments, or why the peer is absent."""
    found: dict[str, Call | str] = {"fuseops": case.op}
    found["eager"] = case.eager or case.op.twin
    found["compile"] = torch.compile(case.op.twin, fullgraph=True, dynamic=False)
    try:
        found["liger"] = case.liger() if case.liger else "no such kernel"
    except ImportError as error:
        found["liger"] = f"not installed: {error}"
    return found


def wrong(case: Case, args: tuple) -> str | None:
    """Why the kernel's result may not be timed, or None."""
    for got, want in zip(
        tree_leaves(case.op.launcher(*args)), tree_leaves(case.op.twin(*args)), strict=True
    ):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"gives {got.dtype}{tuple(got.shape)}, expected {want.dtype}{tuple(want.shape)}"
        if got.numel():
            got, want = got.float(), want.float()
            error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
            if not error < 0.02:
                return f"relative error {error:.2g}"
    return None


class Replay:
    """A candidate captured over rotated buffers; ``time()`` gives microseconds a call."""

    def __init__(self, call: Call, sets: list[tuple]) -> None:
        for _ in range(2):
            kept = [call(*args) for args in sets[:2]]
        torch.cuda.synchronize()
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(sets)
        with torch.cuda.graph(self.graph):
            kept = [call(*args) for args in sets]
        self.kept = kept
        self.graph.replay()

    def time(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def round_robin(replays: dict[str, Replay], rounds: int) -> dict[str, list[float]]:
    """Times of every candidate, one each in every round, in rotated order."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    names = list(replays)
    for i in range(rounds + 2):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken = replays[name].time()
            if i >= 2:
                times[name].append(taken)
    return times


def bandwidth(case: Case, rows: int, n: int, rounds: int) -> dict[str, Any]:
    """One case at one shape: microseconds of every candidate and the share of copy bandwidth."""
    first = (*case.make(rows, n), *case.tail)
    problem = wrong(case, first)
    record: dict[str, Any] = {"case": case.name, "rows": rows, "columns": n}
    if problem:
        return record | {"wrong": problem}
    nbytes = case.op.nbytes(*first)
    count = max(3, -(-FOOTPRINT // nbytes))
    sets = [first, *((*case.make(rows, n), *case.tail) for _ in range(count - 1))]
    replays, absent = {}, {}
    for name, call in candidates(case).items():
        try:
            if isinstance(call, str):
                absent[name] = call
            else:
                replays[name] = Replay(call, sets)
        except Exception as error:  # a peer that cannot run is reported, not hidden
            torch.cuda.synchronize()
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    source = [
        torch.empty(nbytes // 16, dtype=torch.int64, device="cuda").random_() for _ in range(count)
    ]
    for name, copy in (("memcpy", torch.clone), ("copy_kernel", torch.bitwise_not)):
        replays[name] = Replay(copy, [(s,) for s in source])
    times = round_robin(replays, rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    quartiles = {name: statistics.quantiles(t, n=4)[::2] for name, t in times.items()}
    ours = medians.get("fuseops")
    medians["copy"] = min(medians["memcpy"], medians["copy_kernel"])
    return record | {
        "bytes": nbytes,
        "us": {name: round(us, 2) for name, us in medians.items()},
        "quartiles_us": {name: [round(v, 2) for v in q] for name, q in quartiles.items()},
        "gb_s": ours and round(nbytes / ours / 1e3),
        "share_of_copy": ours and round(medians["copy"] / ours, 3),
        "absent": absent,
    }


def small(case: Case, rows: int, n: int) -> dict[str, Any]:
    """Launch cost: microseconds a call on the host (no waiting) and under graph replay."""
    args = (*case.make(rows, n), *case.tail)
    record: dict[str, Any] = {
        "case": case.name,
        "rows": rows,
        "columns": n,
        "host_us": {},
        "graph_us": {},
    }
    for name, call in candidates(case).items():
        if isinstance(call, str):
            continue
        try:
            for _ in range(5):
                call(*args)
            spans = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    call(*args)
                spans.append((time.perf_counter() - start) / 50 * 1e6)
            record["host_us"][name] = round(statistics.median(spans), 1)
            replay = Replay(call, [args] * 20)
            record["graph_us"][name] = round(statistics.median(replay.time() for _ in range(7)), 2)
        except Exception as error:
            record["host_us"][name] = f"{type(error).__name__}: {str(error)[:100]}"
    return record


def tune(case: Case, rows: int, n: int) -> dict[str, Any]:
    """Store the fastest configuration of every kernel of this case."""
    sets = [(*case.make(rows, n), *case.tail) for _ in range(4)]

    def time_us(_: Callable[[], Any]) -> float:
        replay = Replay(case.op, sets)
        return statistics.median(replay.time() for _ in range(5))

    return configs.tune(lambda: case.op(*sets[0]), time_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--budget", type=float, default=420.0, help="seconds after which no new case is begun"
    )
    parser.add_argument(
        "--tune", action="store_true", help="tune this GPU first and keep the result in its cache"
    )
    options = parser.parse_args()
    begun, report = (
        time.perf_counter(),
        {"environment": environment(), "bandwidth": [], "small": [], "tuned": {}},
    )
    chosen = [case for case in cases() if options.only in case.name]
    work: list[tuple] = (
        [(tune, report["tuned"], c, s) for c in chosen for s in c.shapes] if options.tune else []
    )
    work += [(bandwidth, report["bandwidth"], c, s) for c in chosen for s in c.shapes]
    work += [
        (small, report["small"], c, (r, 4096))
        for c in chosen
        if c.name in SMALL_CASES
        for r in SMALL_ROWS
    ]
    for measure, place, case, shape in work:
        if time.perf_counter() - begun > options.budget:
            report.setdefault("skipped", []).append([measure.__name__, case.name, *shape])
            continue
        torch.compiler.reset()
        if measure is tune:
            place.update(tune(case, *shape))
        else:
            place.append(
                measure(case, *shape, *((options.rounds,) if measure is bandwidth else ()))
            )
            print(json.dumps(place[-1]), flush=True)
        torch.cuda.empty_cache()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What the figures belong to."""
    device = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.date.today().isoformat(),
        **configs.versions(),
        "gpu": device.name,
        "sms": device.multi_processor_count,
    }


if __name__ == "__main__":
    main()
