"""Laws of experts over GPUs of one host, as every rank runs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_laws import pretrain
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel, check_overflow
from fuseops.distributed.dispatch import lost, symmetric

D, F, E, TOP = 256, 128, 16, 4
Kinds = tuple[str, ...]  # those without a host sync first
DISPATCHERS: Kinds = ("peer_memory", "fixed_capacity", "host_counts")
OVER_NVSHMEM: Kinds = ("device_counts", "fixed_capacity", "host_counts")
"""Of a process of its own: symmetric memory is of one kind."""


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))


def layer(kind: str | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> fo.MoE:
    """Of experts here, or spread with room for all tokens."""
    torch.manual_seed(0)
    moe = fo.MoE(D, F, E, TOP, device="cuda", dtype=dtype, **options)
    if kind is not None:
        style = ExpertParallel(
            dispatcher=kind, average=False, capacity=float(dist.get_world_size())
        )
        parallelize_module(moe, mesh(), style)
    return moe


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """(T, D) of every rank, of uneven lengths."""
    torch.manual_seed(1)
    return [
        torch.randn(300 + 77 * r, D, device="cuda", dtype=dtype)
        for r in range(dist.get_world_size())
    ]


def stepped(moe: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """y and all gradients of a step, by name; those of what all ranks have are summed over them."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    y = moe(x)
    (y.float() * y.float()).sum().backward()
    found: dict[str, Any] = {"y": y.detach(), "x": x.grad}
    together = any(isinstance(p, DTensor) for p in moe.parameters())
    for name, p in moe.named_parameters():
        found[name] = whole(p.grad).clone()
        if together and not isinstance(p, DTensor):
            dist.all_reduce(found[name])
    return found


def near(mine: Tensor, theirs: Tensor, name: str, most: float) -> None:
    error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
    assert float(error) <= most, f"{name}: {float(error):.1e}"


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def law_every_dispatcher_equals_one_process(kinds: Kinds) -> None:
    """float32, whose products are in TF32 at most on either side; with shared experts beside, twice for both halves."""
    parts, rank = batches(), dist.get_rank()
    start = sum(map(len, parts[:rank]))
    rows = slice(start, start + len(parts[rank]))
    for options in ({}, {"shared_experts": 1, "bias": True}):
        want = stepped(layer(**options), torch.cat(parts))
        for kind in kinds:
            moe = layer(kind, **options)
            for _ in range(2):
                got = stepped(moe, parts[rank])
                for name, right in want.items():
                    right = right[rows] if name in "xy" else right
                    near(got[name], right, f"{kind} {name}", 3e-3)
            check_overflow()


def law_no_host_sync_and_a_replay_routes_anew(kinds: Kinds) -> None:
    torch.manual_seed(3 + dist.get_rank())
    for kind, options in (
        (kinds[0], {}),
        (kinds[0], {"shared_experts": 1}),
        (kinds[1], {"shared_experts": 1}),
    ):
        moe = layer(kind, torch.bfloat16, **options)
        x = torch.randn(512, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        leaves = [x, *moe.parameters()]
        held: dict[str, Tensor] = {}

        def step(moe: Any = moe, x: Tensor = x, leaves: Any = leaves, held: Any = held) -> None:
            for leaf in leaves:
                leaf.grad = None
            held["y"] = moe(x)
            held["y"].backward(torch.ones_like(x))

        def found(leaves: Any = leaves, held: Any = held) -> list[Tensor]:
            grads = [p.grad.to_local() if isinstance(p, DTensor) else p.grad for p in leaves]
            return [t.clone() for t in (held["y"].detach(), *grads)]

        replay = captured(step)
        kept = [held["y"], *(p.grad for p in leaves)]
        for _ in range(3):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
            replay()
            got = [(t.to_local() if isinstance(t, DTensor) else t).clone() for t in kept]
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for mine, theirs in zip(got, found(), strict=True):
                assert torch.equal(mine, theirs), kind
        check_overflow()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a graph, after some on the side."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def law_an_overflow_raises_by_itself(kinds: Kinds) -> None:
    """On all ranks: behind the step, or before the next, once the device is through; no step waits for it."""
    x = batches()[dist.get_rank()]
    for kind in kinds[:-1]:
        moe = fo.MoE(D, F, E, TOP, device="cuda")
        parallelize_module(moe, mesh(), ExpertParallel(dispatcher=kind, capacity=0.3))
        for _ in range(2):  # buffers are made in the first
            with pytest.raises(
                fo.FuseOpsError, match=r"on rank 0, 1 more tokens .* tokens a rank\)"
            ):
                moe(x).sum().backward()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    moe(x)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        check_overflow()


def law_dispatched_again_is_what_arrived(kinds: Kinds) -> None:
    """To the bit, by every dispatcher; with no host sync by those that have none; a captured step routes anew."""
    x = batches(torch.bfloat16)[dist.get_rank()]
    for kind in kinds:
        moe = layer(kind, torch.bfloat16)
        want = stepped(moe, x)
        with offload.dispatch_again():
            assert "fc1.x" not in {s.name for s in moe.plan(x).saved}
            got = stepped(moe, x)
        for name, theirs in want.items():
            assert torch.equal(got[name], theirs), (kind, name)
        check_overflow()
    for kind in kinds[:2]:
        moe = layer(kind, torch.bfloat16)
        given = x.clone()
        parameters = [*moe.parameters()]

        def step(moe: Any = moe, given: Tensor = given) -> None:
            moe.zero_grad(set_to_none=True)
            with offload.dispatch_again():
                moe(given).square().sum().backward()

        replay = captured(step)
        kept = [p.grad for p in parameters]
        given.copy_(torch.randn_like(given))
        replay()
        got = [whole(t).clone() for t in kept]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for mine, p in zip(got, parameters, strict=True):
            assert torch.equal(mine, whole(p.grad)), kind
        check_overflow()


def law_pretraining_waits_for_nothing_in_a_step(kinds: Kinds) -> None:
    """A host that begins a forward together with the device falls behind it where saved tensors pass hooks."""
    example, device = pretrain(), torch.device("cuda", torch.cuda.current_device())
    given = "--dim 256 --heads 2 --ffn 128 --context 128 --dense-every 2 --capacity 2 --dispatcher"
    run = example.Run(example.parsed([*given.split(), kinds[0]]), device)
    plan = run.plans(policy=offload.Policy(min_bytes=1))[0]
    with offload.Scheduler(run.model, "blocks.*", plan=plan):
        for _ in range(3):
            run.train()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = run.train()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
    check_overflow()


class Block(nn.Module):
    """A dense product that FSDP2 shards, and experts that are spread."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D, device="cuda")
        self.moe = layer(kind, shared_experts=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(torch.tanh(self.dense(x)))


def law_fully_sharded_prefetches_beside_it(kinds: Kinds) -> None:
    """FSDP2 gathers the next two blocks on its streams while tokens travel: to the bit the numbers of a run that
    prefetches nothing, step after step, and within rounding those of the way over NCCL.
    """
    torch.manual_seed(5)
    x = torch.randn(512, D, device="cuda") + dist.get_rank()

    def run(kind: str, depth: int) -> list[Tensor]:
        torch.manual_seed(6)
        model = nn.Sequential(*(Block(kind) for _ in range(4)))
        spread = {p for p in model.parameters() if isinstance(p, DTensor)}
        blocks: list[Any] = list(model)
        for block in (*blocks, model):
            fully_shard(block, mesh=mesh(), ignored_params=spread)
        for k, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(k - depth, 0) : k][::-1])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            y = model(x)
            y.square().mean().backward()
            seen += [y.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
            optimizer.step()
        check_overflow()
        return seen

    want = run(kinds[0], 0)
    for mine, theirs in zip(run(kinds[0], 2), want, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(run("host_counts", 2), want, strict=True):
        near(mine, theirs, "host_counts", 3e-3)


def the_second_is_killed_inside_a_dispatch(said: str) -> None:
    """Before the barrier in which the first waits for it on its GPU, and is ended by its error. said: file of stderr"""
    symmetric.TIMEOUT_MS, lost.GRACE_SECONDS = 6000, 0.5
    moe, x = layer("peer_memory"), batches()[dist.get_rank()]
    stepped(moe, x)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        symmetric.PeerBuffers.barrier = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.stderr = Path(said).open("w")  # noqa: SIM115
    moe(x)
    torch.cuda.synchronize()


LAWS = [name for name in vars() if name.startswith("law_")]
