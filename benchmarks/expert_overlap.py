"""What it gains that tokens travel to experts of other ranks while products run, over several GPUs of one host.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc-per-node 2 benchmarks/expert_overlap.py --out benchmarks/results/expert_overlap_h200x2.json

Two blocks of attention and experts, one of them shared, 8192 tokens a rank, bf16, forward and backward. First the
gradients of each candidate are compared with those of the first of its dispatcher, to the bit. Then candidates run in
turn, as in distributed.py; ratios are of each round.

    in line    every transfer is waited for where it begins
    beside     as the dispatchers of `fuseops.distributed` do it: under the shared expert, and under weight gradients
    memory     the same under `prefer="memory"`: on the way back under fc1's weight gradient alone
    pairs      the forward of one micro-batch in turns with the backward of the one before, as `overlap_pairs` runs them
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import layers, measure
from distributed import SHAPES, in_turn, local
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops.distributed import ExpertParallel, check_overflow
from fuseops.distributed.dispatch import FixedCapacity, HostCounts
from fuseops.distributed.dispatch.all_to_all import AllToAll
from fuseops.distributed.pairs import Pair

DISPATCHERS = {"host_counts": HostCounts, "fixed_capacity": FixedCapacity}
HEAD = 128  # features of a head of attention


class InLine(AllToAll):
    """A dispatcher whose transfers are waited for where they begin."""

    overlaps_compute = False

    def _start(self, *args: Any) -> tuple[Tensor, Callable[[], Any]]:
        out, ready = super()._start(*args)
        ready()
        return out, lambda: None


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(d), nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEAD)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.attention, self.norm = Attention(sizes[0]), nn.RMSNorm(sizes[0])
        self.moe = fo.MoE(*sizes, shared_experts=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.moe(self.norm(x))


def model_of(sizes: tuple[int, ...], mesh: DeviceMesh, dispatcher: Any, prefer: str) -> nn.Module:
    """Two blocks, of the same weights whenever it is called."""
    torch.manual_seed(1)
    with torch.device(mesh.device_type):
        model = nn.Sequential(Block(sizes), Block(sizes)).to(torch.bfloat16)
    parallelize_module(model, mesh, ExpertParallel(dispatcher=dispatcher))
    fo.configure(model, prefer=prefer)
    return model


def paired_step(model: nn.Module, x: Tensor, dy: Tensor) -> measure.Call:
    """A forward in turns with the backward of the one before."""
    ahead = [model(x)]

    def forward() -> None:
        ahead.append(model(x))

    def step() -> None:
        model.zero_grad()
        Pair(forward, partial(ahead.pop().backward, dy)).run()

    return step


def cell(sizes: tuple[int, ...], mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """One shape."""
    torch.manual_seed(2 + dist.get_rank())
    x = torch.randn(2, options.tokens // 2, sizes[0], device=mesh.device_type).bfloat16()
    dy = torch.randn_like(x)
    steps: dict[str, measure.Call] = {}
    record: dict[str, Any] = {"differs": []}
    for name, dispatcher in DISPATCHERS.items():
        in_line = type(name, (InLine, dispatcher), {})
        right: list[Tensor] = []
        for how, taken, prefer in (
            ("in line", in_line, "speed"),
            ("beside", name, "speed"),
            ("memory", name, "memory"),
            ("pairs", name, "speed"),
        ):
            model = model_of(sizes, mesh, taken, prefer)
            torch.use_deterministic_algorithms(True)  # from the forward of a pair on
            one = layers.training_step(partial(model, x), dy, model.parameters())
            step = paired_step(model, x, dy) if how == "pairs" else one
            step()
            got = [local(p.grad) for p in model.parameters()]
            torch.use_deterministic_algorithms(False)
            right = right or got
            if not all(map(torch.equal, got, right)):
                record["differs"].append(f"{name}/{how}")
            steps[f"{name}/{how}"] = step
    us = in_turn(steps, options.rounds * len(steps), options.span)
    record["us"] = measure.medians(us)
    record["over_in_line"] = {
        name: measure.paired(us[name], us[name.split("/")[0] + "/in line"])
        for name in steps
        if not name.endswith("in line")
    }
    check_overflow()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1, help="times the number of candidates")
    parser.add_argument("--span", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))
    found: dict[str, Any] = {
        "environment": {**measure.environment(), "gpus": dist.get_world_size()},
        "cells": {},
    }
    for name in options.only:
        found["cells"][name] = cell(SHAPES[name], mesh, options)
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(name, json.dumps(found["cells"][name]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
