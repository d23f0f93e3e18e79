"""An MoE layer over several GPUs of one host, each dispatcher beside a layer as torchtitan writes it.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc-per-node 2 benchmarks/distributed.py --out benchmarks/results/distributed_h200x2.json

8192 tokens a rank, bf16, forward and backward. First each is compared with one process that has the tokens and the
experts of all ranks; but for `host_counts` a step runs under `set_sync_debug_mode("error")`, and one of the first
dispatcher is captured and replayed with other tokens. Then candidates run in turn, back to back, `--span` seconds to
warm up and as long in each round; a figure is that of the slowest rank. Ratios are of each round.

    peer_memory, fixed_capacity, host_counts    the dispatchers of `fuseops.distributed`: a token once a rank
    device_counts               with `--first device_counts`, in the place of peer_memory: a process has one of the two
    captured                    the first one, the step as a CUDA graph
    titan                       rows once a copy, all_to_all_single with counts that the host reads, sorted by torch
                                ops, `F.grouped_mm`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import layers, measure
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops.distributed import ExpertParallel, check_overflow

# name: model width d, expert width n, experts E, chosen K
SHAPES = {
    "qwen3_30b": (2048, 768, 128, 8),
    "sonic_30b": (4096, 1024, 64, 4),
    "mixtral": (4096, 14336, 8, 2),
}
TITAN = {"qwen3_30b": 1.6, "sonic_30b": 1.3, "mixtral": 1.05}  # how many times its speed
COUNTS = {"qwen3_30b": 1.3, "sonic_30b": 1.15, "mixtral": 1.0}  # of peer_memory over host_counts
SHARE = {
    "qwen3_30b": 0.2,
    "sonic_30b": 0.22,
    "mixtral": 0.04,
}  # of communication in a step, at most
FIRST = ("peer_memory", "device_counts")


class Problem:
    """One shape on one rank: weights and tokens, drawn alike on all ranks where all have them."""

    def __init__(self, tokens: int, d: int, n: int, experts: int, k: int) -> None:
        torch.manual_seed(1)
        self.k, self.experts, self.sizes = k, experts, (d, n, experts, k)
        self.weights = {
            "router": measure.rnd(experts, d, scale=0.02),
            "fc1": measure.rnd(experts, 2 * n, d, scale=0.02),
            "fc2": measure.rnd(experts, d, n, scale=0.02),
        }
        torch.manual_seed(2 + dist.get_rank())
        self.x, self.dy = measure.rnd(tokens, d).requires_grad_(), measure.rnd(tokens, d)

    def layer(self, mesh: DeviceMesh | None = None, dispatcher: str | None = None) -> fo.MoE:
        moe = fo.MoE(*self.sizes, device="meta", dtype=torch.bfloat16)
        if mesh is not None:
            parallelize_module(moe, mesh, ExpertParallel(dispatcher=dispatcher, average=False))
        for name, weight in self.weights.items():
            held = moe[name].weight
            if name != "router" and mesh is not None:
                local = weight.chunk(mesh.size())[mesh.get_local_rank()].clone()
                weight = type(held).from_local(local, mesh, held.placements, run_check=False)
            moe[name].weight = nn.Parameter(weight)
        return moe

    def titan(self, mesh: DeviceMesh) -> tuple[measure.Call, list[Tensor]]:
        """The peer's forward, and its leaves: x, router, fc1, fc2."""
        rank, world = mesh.get_local_rank(), mesh.size()
        mine = [self.weights[n].chunk(world)[rank].clone() for n in ("fc1", "fc2")]
        leaves = [self.x, *(w.requires_grad_() for w in (self.weights["router"].clone(), *mine))]
        return partial(titan, *leaves, self.k, mesh.get_group()), leaves


def titan(x: Tensor, wr: Tensor, w1: Tensor, w2: Tensor, k: int, group: Any) -> Tensor:
    experts, world = len(wr), dist.get_world_size(group)
    scores, chosen = (x @ wr.t()).float().softmax(-1).topk(k, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.histc(chosen.flatten().float(), experts, 0, experts - 1).long()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    splits = torch.stack([counts.view(world, -1).sum(1), theirs.view(world, -1).sum(1)]).cpu()
    sent, received = splits.tolist()
    rows = all_to_all_single_autograd(x[order // k], received, sent, group)
    of_rank = torch.arange(experts // world, device=x.device).repeat(world)
    expert = of_rank.repeat_interleave(theirs, output_size=len(rows))
    by_expert = expert.argsort(stable=True)
    offs = theirs.view(world, -1).sum(0).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(rows[by_expert], w1.transpose(1, 2), offs=offs).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(rows), device=x.device)
    y = all_to_all_single_autograd(y[back], sent, received, group)
    y = y * scores.flatten()[order][:, None].to(y.dtype)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    return y[place].view(len(x), k, -1).sum(1)


# --- is it right?


def errors(p: Problem, forward: measure.Call, leaves: list[Tensor], mesh: DeviceMesh) -> Any:
    """Relative errors to a layer that has everything: of y and dx here, of the experts' gradients here."""
    rank, world = mesh.get_local_rank(), mesh.size()
    y, *grads = map(local, layers.results(forward, p.dy, leaves))
    xs = [torch.empty_like(p.x) for _ in range(world)]
    dys = [torch.empty_like(p.dy) for _ in range(world)]
    dist.all_gather(xs, p.x.detach())
    dist.all_gather(dys, p.dy)
    whole, x = p.layer(), torch.cat(xs).requires_grad_()
    want = whole(x)
    want.backward(torch.cat(dys))
    rows = slice(rank * len(p.x), (rank + 1) * len(p.x))
    right = [whole[n].weight.grad.chunk(world)[rank] for n in ("fc1", "fc2")]
    pairs = {"y": (y, want[rows]), "x": (grads[0], x.grad[rows])}
    pairs |= {"fc1": (grads[2], right[0]), "fc2": (grads[3], right[1])}
    return {n: slowest(measure.relative_error(a.float(), b.float())) for n, (a, b) in pairs.items()}


def local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def clear(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def slowest(value: float) -> float:
    """The largest of all ranks."""
    t = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def without_sync(step: measure.Call) -> str:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return f"waits: {error}"[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def replayed(
    p: Problem, moe: fo.MoE, leaves: list[Tensor]
) -> tuple[measure.Call, dict[str, float]]:
    """A captured step, and how far it is from an eager one on tokens that it has not seen."""
    out: dict[str, Tensor] = {}

    def step() -> None:
        clear(leaves)
        out["y"] = moe(p.x)
        out["y"].backward(p.dy)

    replay = layers.captured(step)
    captured = [out["y"], *(leaf.grad for leaf in leaves)]
    found: dict[str, float] = {}
    kept = p.x.detach().clone()
    for seed in (7, 8, 9):
        torch.manual_seed(seed + dist.get_rank())
        with torch.no_grad():
            p.x.copy_(measure.rnd(*p.x.shape))
        replay()
        got = [local(t).clone() for t in captured]
        step()
        want = [out["y"], *(local(leaf.grad) for leaf in leaves)]
        for name, a, b in zip(("y", "x", "router", "fc1", "fc2"), got, want, strict=True):
            found[name] = max(found.get(name, 0.0), slowest(measure.relative_error(a, b)))
    with torch.no_grad():
        p.x.copy_(kept)
    return replay, found


# --- how fast?


def in_turn(calls: dict[str, measure.Call], rounds: int, span: float) -> measure.Rounds:
    """As `measure.in_turn`, with as many calls on every rank. Microseconds of the slowest rank."""
    laps = {}
    for name, call in calls.items():
        dist.barrier()
        laps[name] = max(round(span / slowest(seconds(call))), 1)

    def timer(name: str) -> float:
        for _ in range(laps[name]):
            calls[name]()
        start = measure.mark()
        for _ in range(laps[name]):
            calls[name]()
        end = measure.mark()
        end.synchronize()
        return slowest(start.elapsed_time(end) * 1e3 / laps[name])

    return measure.in_rounds({n: partial(timer, n) for n in calls}, rounds, heat=1)


def seconds(call: measure.Call) -> float:
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def cell(sizes: tuple[int, ...], mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """One shape."""
    p = Problem(options.tokens, *sizes)
    record: dict[str, Any] = {"errors": {}, "failed": {}, "host_syncs": {}}
    steps: dict[str, measure.Call] = {}
    first = options.first
    for name in (first, "fixed_capacity", "host_counts"):
        moe = p.layer(mesh, name)
        leaves = [p.x, *(moe[n].weight for n in ("router", "fc1", "fc2"))]
        record["errors"][name] = errors(p, partial(moe, p.x), leaves, mesh)
        steps[name] = layers.training_step(partial(moe, p.x), p.dy, leaves)
        steps[name]()
        if name != "host_counts":
            record["host_syncs"][name] = without_sync(steps[name])
        if name == first:
            steps["captured"], record["replay_errors"] = replayed(p, moe, leaves)
            check_overflow()
    forward, leaves = p.titan(mesh)
    record["errors"]["titan"] = errors(p, forward, leaves, mesh)
    steps["titan"] = layers.training_step(forward, p.dy, leaves)
    d, n, _, k = sizes
    us = in_turn(steps, options.rounds * len(steps), options.span)
    flops = 18 * options.tokens * k * n * d
    record["us"] = measure.medians(us)
    record["tflops"] = {
        name: round(flops / statistics.median(t) / 1e6, 1) for name, t in us.items()
    }
    record["over_titan"] = measure.paired(us[first], us["titan"])
    record["captured_over_titan"] = measure.paired(us["captured"], us["titan"])
    record["over_host_counts"] = measure.paired(us[first], us["host_counts"])
    if options.profile:
        record["kernels"] = {name: layers.kernels(step) for name, step in steps.items()}
        record["communication"] = communication(record["kernels"]["captured"])
    check_overflow()
    return record


def communication(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """What of a step goes to the ways between GPUs, slots, copies and barriers included, by its kernels above 5 us."""
    names = (
        "token_slots", "send_tokens", "take_tokens", "return_sums", "add_sums", "barrier", "allToAllV",
        "exchangeSplit",
    )  # fmt: skip
    us = sum(k["us"] for k in kernels if any(name in k["kernel"] for name in names))
    return {"us": round(us, 1), "share": round(us / kernels[-1]["us"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--first", choices=FIRST, default=FIRST[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2, help="times the number of candidates")
    parser.add_argument("--span", type=float, default=0.2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))
    found: dict[str, Any] = {
        "environment": {**measure.environment(), "gpus": dist.get_world_size()},
        "bars": {"over_titan": TITAN, "over_host_counts": COUNTS, "communication": SHARE},
        "cells": {},
    }
    for name in options.only:
        found["cells"][name] = cell(SHAPES[name], mesh, options)
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(
                name, json.dumps({k: v for k, v in found["cells"][name].items() if k != "kernels"})
            )
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
