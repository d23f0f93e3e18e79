"""A gated MLP over two GPUs: whole on one, sharded with and without sequence parallelism, and overlapped.

Forward and backward in turns; errors are those of the sharded results beside the whole ones, in bf16.
Run it: python benchmarks/tensor_parallel.py --out FILE       (two CUDA devices)
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import measure
from distributed import in_turn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import distributed

SHAPES = ((8192, 4096, 14336), (16384, 2048, 6144), (32768, 4096, 14336))  # T, D, F
ROUNDS, SPAN = 6, 0.2


def mlp(d: int, f: int) -> nn.Module:
    linear = lambda i, o: fo.ops.Linear(i, o, bias=False)  # noqa: E731
    model = fo.Residual(fo.ops.RMSNorm(d), linear(d, 2 * f), fo.ops.SwiGLU(), linear(f, d))
    return model.to("cuda", torch.bfloat16)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(x.detach())
    return y.detach(), x.grad


def compared(mesh: DeviceMesh, shape: tuple[int, int, int]) -> dict[str, Any]:
    """One shape: errors, and ms of a step of each way."""
    rows, d, f = shape
    torch.manual_seed(0)
    whole = mlp(d, f)
    x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(x, 0)
    mine = x.chunk(2)[mesh.get_local_rank()]
    ways: dict[str, tuple[nn.Module, Tensor]] = {"one GPU": (whole, x)}
    for name, options, rules in (
        ("TP", {}, ()),
        ("TP, sequence parallel", {"sequence_parallel": True}, ()),
        ("with overlap", {"sequence_parallel": True}, distributed.overlap_rules),
    ):
        model = copy.deepcopy(whole)
        parallelize_module(model, mesh, distributed.tp_plan(model, **options))
        fo.configure(model, rules=rules, disable=["mlp"] if rules else [])
        ways[name] = (model, mine if options else x)
    y, dx = step(whole, x)
    found: dict[str, Any] = {"T, D, F": shape, "error": {}, "ms": {}}
    for name, (model, given) in ways.items():
        got, dgot = step(model, given)
        part = (lambda t: t) if given is x else lambda t: t.chunk(2)[mesh.get_local_rank()]
        pairs = [(got, part(y)), (dgot, part(dx))]
        if model is not whole:
            of_both = zip(model.parameters(), whole.parameters(), strict=True)
            pairs += [(p.grad.full_tensor().reshape(q.shape), q.grad) for p, q in of_both]  # type: ignore[union-attr]
        found["error"][name] = max(measure.relative_error(a, b.float()) for a, b in pairs)
    us = in_turn({name: partial(step, *way) for name, way in ways.items()}, ROUNDS, SPAN)
    found["ms"] = {name: statistics.median(times) / 1e3 for name, times in us.items()}
    return found


def run(rank: int, store: str, out: Path | None) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    init = f"file://{store}"
    dist.init_process_group("nccl", init_method=init, rank=rank, world_size=2, device_id=device)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    result = {"environment": measure.environment(), "shapes": []}
    for shape in SHAPES:
        row = compared(mesh, shape)
        result["shapes"].append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(str(Path(folder) / "store"), args.out), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
