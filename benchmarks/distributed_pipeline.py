"""A pipeline of two ranks with two chunks each, and offload: what leaves the peak of every rank, and what it costs.

Each rank runs its stages of one dense model under torch's ScheduleInterleaved1F1B, in turn without offload and with a
Scheduler that follows the rank's plan of `offload.plan_pipeline`. What was to leave is the decrease of the peak that
the plan predicts.
Run it: python benchmarks/distributed_pipeline.py --out FILE       (two CUDA devices; --backend gloo --small needs none)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import measure
from common.offload_stacks import SHAPES, SMALL, block
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import offload

RANKS, CHUNKS = 2, 2
GIB = 2**30
MOVES = {  # what may leave
    "attention": (
        "**.attn.2.**",
    ),  # q, k, v in one buffer, its output and statistics, as the reference moves them
    "all": ("**",),
}


class Stage(nn.Module):
    """Some blocks of a model in a row."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x


class Whole(nn.Module):
    """The model of all ranks, with its loss."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return loss(x, target)


class Part(nn.Module):
    """The blocks of a rank under the paths that they have in the whole model."""

    def __init__(self, blocks: dict[int, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(k): module for k, module in blocks.items()})


class Rank:
    """One rank: its stages, their schedule, and its ways to run a step."""

    def __init__(self, rank: int, args: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.args, self.device = rank, args, device
        self.shape = (SMALL if args.small else SHAPES)["dense"]._replace(blocks=args.blocks)
        self.dtype = torch.float32 if args.small else torch.bfloat16
        each = args.blocks // (RANKS * CHUNKS)
        torch.manual_seed(rank)
        with torch.device(device):
            made = {
                stage * each + k: block(self.shape).to(self.dtype)
                for stage in range(rank, RANKS * CHUNKS, RANKS)
                for k in range(each)
            }
            rows = args.micro_batches * self.shape.tokens
            self.x = torch.randn(rows, self.shape.d, dtype=self.dtype)
        self.part = Part(made)
        blocks = list(made.values())
        stages = [
            PipelineStage(
                Stage(blocks[chunk * each : (chunk + 1) * each]),
                rank + RANKS * chunk,
                RANKS * CHUNKS,
                device,
            )
            for chunk in range(CHUNKS)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, args.micro_batches, loss_fn=loss)
        self.schedulers: dict[str, Any] = {}

    def step(self) -> None:
        self.part.zero_grad(set_to_none=False)
        if self.rank == 0:
            self.schedule.step(self.x, return_outputs=False)
        else:
            self.schedule.step(target=self.x, return_outputs=False)

    def plans(self) -> dict[str, Any]:
        """The plans of this rank, from recorded steps of the whole model over one micro-batch."""
        with torch.device(self.device):
            model = Whole([block(self.shape).to(self.dtype) for _ in range(self.shape.blocks)])
            sample = torch.randn(self.shape.tokens, self.shape.d, dtype=self.dtype)
        cuda = self.device.type == "cuda"
        hardware = offload.Hardware.measure(dist.group.WORLD) if cuda else offload.Hardware.h200()
        least = 1 if self.args.small else 32 << 20
        options: dict[str, Any] = {"record": True, "hardware": hardware, "layers": "blocks.*"}
        pipeline = offload.Pipeline(RANKS, self.args.micro_batches, CHUNKS)
        found = {}
        for name in self.args.moves:
            policy = offload.Policy(offload=MOVES[name], min_bytes=least)
            step = offload.plan(model, sample, sample.clone(), policy=policy, **options)
            found[name] = offload.plan_pipeline(step.profile, hardware, pipeline)[self.rank]
        return found

    # --- figures

    def active(self, what: str) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device)[f"active_bytes.all.{what}"])

    def visit(self, way: Callable[[], Any]) -> dict[str, float]:
        """A step to get in, and some that count: ms of one, and bytes at the peak."""
        with way():
            self.step()
            self.sync()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(self.args.steps):
                self.step()
            self.sync()
            ms = (time.perf_counter() - begun) * 1e3 / self.args.steps
            return {"ms": ms, "peak": self.active("peak")}

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.part.parameters()]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y * target).sum(dtype=torch.float32)


def run(rank: int, args: argparse.Namespace, store: str, out: Any) -> None:
    cuda = args.backend == "nccl"
    device = torch.device(f"cuda:{rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        args.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        device_id=device if cuda else None,
    )
    mine = Rank(rank, args, device)
    plans = mine.plans()
    if cuda:
        torch.cuda.empty_cache()
    for name, plan in plans.items():
        mine.schedulers[name] = offload.Scheduler(mine.part, "blocks.*", plan=plan)
        if rank == 0:
            print(f"{name}\n{plan.explain()}", flush=True)
    ways = {
        "nothing": contextlib.nullcontext,
        **{n: lambda s=s: s for n, s in mine.schedulers.items()},
    }
    equal = alike(mine, ways)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    orders, end, go = measure.orders(ways), time.perf_counter() + args.seconds, True
    while go:
        for name in next(orders):
            rounds[name].append(mine.visit(ways[name]))
        more = torch.tensor([time.perf_counter() < end], dtype=torch.int32, device=device)
        dist.broadcast(more, 0)
        go = bool(more.item())
    found = {
        name: summary(rounds, name, plan, mine.schedulers[name])
        | {"gradients_bit_equal": equal[name], "repeats_bit_equal": equal["nothing"]}
        for name, plan in plans.items()
    }
    out.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def alike(mine: Rank, ways: dict[str, Any]) -> dict[str, bool]:
    """Whether the gradients of each way are to the bit those of steps without offload, which are first repeated: under
    deterministic kernels. With `warn_only` attention's backward would add in any order: torch only warns of it then.
    """
    expected, found = None, {}
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for name, way in [("first", contextlib.nullcontext), *ways.items()]:
            with way():
                for _ in range(3):
                    mine.step()
                got = mine.gradients()
            expected = expected or got
            found[name] = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    torch.use_deterministic_algorithms(False)
    return found


def summary(
    rounds: dict[str, list[dict[str, float]]], name: str, plan: Any, scheduler: Any
) -> dict[str, Any]:
    base, moved = rounds["nothing"], rounds[name]
    before, after = (max(r["peak"] for r in rows) for rows in (base, moved))
    to_leave = plan.before.peak - plan.after.peak
    ratios = [b["ms"] / a["ms"] for a, b in zip(base, moved, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "peak_gib": before / GIB,
        "peak_with_offload_gib": after / GIB,
        "to_leave_gib": to_leave / GIB,
        "left_of_it": (before - after) / to_leave if to_leave else None,
        "predicted_peak_gib": plan.before.peak / GIB,
        "ms": statistics.median(r["ms"] for r in base),
        "ms_with_offload": statistics.median(r["ms"] for r in moved),
        "step_ratio": statistics.median(ratios),
        "step_ratio_quartiles": [quartiles[0], quartiles[2]],
        "rounds": len(ratios),
        "plan_moves_gib_a_step": plan.bytes_of("offload") / GIB,
        "predicted_ms": plan.before.seconds * 1e3,
        "predicted_stalls_ms": plan.after.stall * 1e3,
        "schedule": dict(scheduler.report().schedule),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--moves", nargs="+", default=[*MOVES], choices=[*MOVES])
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic where asked
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=run, args=(r, args, store, out)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        found = {}
        while len(found) < RANKS:
            if any(process.exitcode not in (None, 0) for process in ranks):
                for process in ranks:
                    process.kill()
                sys.exit("a rank failed")
            with contextlib.suppress(Exception):
                rank, row = out.get(timeout=2)
                found[rank] = row
        for process in ranks:
            process.join()
    result = {
        "environment": {**measure.environment(), "backend": args.backend, "ranks": RANKS},
        "model": (SMALL if args.small else SHAPES)["dense"]._replace(blocks=args.blocks)._asdict(),
        "pipeline": f"ScheduleInterleaved1F1B, {RANKS} ranks, {CHUNKS} chunks",
        "micro_batches": args.micro_batches,
        "may_leave": {name: MOVES[name] for name in args.moves},
        "summary": {
            f"rank {rank}, {name}": {k: v for k, v in row.items() if k != "schedule"}
            for rank, rows in sorted(found.items())
            for name, row in rows.items()
        },
        "schedules": {
            f"rank {rank}, {name}": row["schedule"]
            for rank, rows in sorted(found.items())
            for name, row in rows.items()
        },
    }
    for title, row in result["summary"].items():
        print(title, flush=True)
        for key, value in row.items():
            print(f"  {key:24} {value}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
