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
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import measure
from common.offload_ranks import OffloadedRank
from common.offload_stacks import SHAPES, SMALL, block
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import offload

RANKS, CHUNKS = 2, 2
MOVES = {  # what may leave
    # q, k, v in one buffer, its output and statistics, as the reference moves them
    "attention": ("**.attn.2.**",),
    "all": ("**",),
}


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


class Rank(OffloadedRank):
    """One rank: its stages, their schedule, and its ways to run a step."""

    def __init__(self, rank: int, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        self.rank, self.args = rank, args
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
                nn.Sequential(*blocks[chunk * each : (chunk + 1) * each]),
                rank + RANKS * chunk,
                RANKS * CHUNKS,
                device,
            )
            for chunk in range(CHUNKS)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, args.micro_batches, loss_fn=loss)

    def step(self) -> None:
        self.part.zero_grad(set_to_none=False)
        if self.rank == 0:
            self.schedule.step(self.x, return_outputs=False)
        else:
            self.schedule.step(target=self.x, return_outputs=False)

    def follow_plans(self) -> None:
        """The plans of this rank, from recorded steps of the whole model over one micro-batch."""
        with torch.device(self.device):
            model = Whole([block(self.shape).to(self.dtype) for _ in range(self.shape.blocks)])
            sample = torch.randn(self.shape.tokens, self.shape.d, dtype=self.dtype)
        hardware = (
            offload.Hardware.measure(dist.group.WORLD) if self.cuda else offload.Hardware.h200()
        )
        least = 1 if self.args.small else 32 << 20
        options: dict[str, Any] = {"record": True, "hardware": hardware, "layers": "blocks.*"}
        pipeline = offload.Pipeline(RANKS, self.args.micro_batches, CHUNKS)
        for name in self.args.moves:
            policy = offload.Policy(offload=MOVES[name], min_bytes=least)
            step = offload.plan(model, sample, sample.clone(), policy=policy, **options)
            plan = offload.plan_pipeline(step.profile, hardware, pipeline)[self.rank]
            self.follow(name, self.part, plan)

    def gradients(self, name: str) -> list[Tensor]:
        with self.way(name), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            for _ in range(3):
                self.step()
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
    mine.follow_plans()
    if cuda:
        torch.cuda.empty_cache()
    for name, plan in mine.plans.items():
        if rank == 0:
            print(f"{name}\n{plan.explain()}", flush=True)
    same, rounds = mine.same(mine.gradients), mine.rounds()
    out.put((rank, {name: mine.summary(rounds, name) | same[name] for name in mine.plans}))
    dist.barrier()
    dist.destroy_process_group()


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
