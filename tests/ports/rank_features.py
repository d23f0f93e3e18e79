"""Features that need a second rank: ways to spread a model, and checkpoints between one rank and two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from port import Feature, Port
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fuseops as fo
from fuseops.distributed import ExpertParallel, expert_placement


@cache
def meshes() -> DeviceMesh:
    """Each rank alone, and all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (1, dist.get_world_size()), mesh_dim_names=("alone", "all"))


def sharded(port: Port, model: nn.Module, **policy: Any) -> nn.Module:
    """FSDP2: each block by itself, then the rest. Experts that are spread already have one rank a shard."""
    place = expert_placement(meshes()["alone"]) if spread_weights(model) else None
    for module in (*port.blocks(model), model):
        fully_shard(module, mesh=meshes()["all"], shard_placement_fn=place, **policy)
    return model


def replicated(port: Port, model: nn.Module) -> nn.Module:
    """DDP. Experts that are spread are no replicas of each other."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, spread_weights(model)
    )
    return DistributedDataParallel(model)


def spread_weights(model: nn.Module) -> list[str]:
    """The parameters of which every rank has a part of its own."""
    fully = isinstance(model, FSDPModule)
    return [n for n, p in model.named_parameters() if isinstance(p, DTensor) and not fully]


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients are averaged over the ranks after the last micro-batch alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def split(port: Port, model: nn.Module) -> nn.Module:
    """Experts over all ranks. Losses of routers stay those of a rank's own tokens, as in the stock model."""
    parallelize_module(model, meshes()["all"], ExpertParallel())
    for module in model.modules():
        if isinstance(module, fo.ops.Router):
            module.over = None
    return model


def whole(t: Tensor) -> Tensor:
    """A tensor of all ranks."""
    return t.full_tensor() if isinstance(t, DTensor) else t


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        path = [mine]
        dist.broadcast_object_list(path, src=0)
        yield Path(path[0])
        dist.barrier()


def distributed_checkpoint(port: Port, model: nn.Module) -> nn.Module:
    """Two ranks save, one loads and saves, two load: the weights come back, under the stock keys."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    stock = port.to_stock(inner.state_dict())
    with shared_folder() as folder:
        dcp.save(stock, checkpoint_id=folder / "two")
        if dist.get_rank() == 0:
            alone = {n: torch.full(t.shape, float("nan"), dtype=t.dtype) for n, t in stock.items()}
            dcp.load(alone, checkpoint_id=folder / "two", no_dist=True)
            dcp.save(alone, checkpoint_id=folder / "one", no_dist=True)
        dist.barrier()
        again = {n: torch.full_like(t, float("nan")) for n, t in stock.items()}
        dcp.load(again, checkpoint_id=folder / "one")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    inner.load_state_dict(port.to_ported(again))
    return model


SINGLE_PRECISION = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
EP, FSDP, FSDP_MIXED = "EP=2", "FSDP2", "FSDP2, mixed precision"
FEATURES = (
    Feature(EP, split, 2, ranks=2, on_stock=False),
    Feature(FSDP, sharded, 2, synchronised=synchronised, ranks=2, on_stock=False),
    Feature(
        FSDP_MIXED,
        partial(sharded, mp_policy=SINGLE_PRECISION),
        2,
        synchronised=synchronised,
        rounds_to=torch.float32,
        ranks=2,
        on_stock=False,
    ),
    Feature("DDP", replicated, 2, synchronised=synchronised, ranks=2, on_stock=False),
    Feature("distributed checkpoint", distributed_checkpoint, 3, ranks=2, on_stock=False),
)


def refusals(refusal: Callable[..., Any]) -> list[Any]:
    """Pairs that torch refuses."""
    deepcopy, pickled, twice, both = (
        "FSDP2 does not copy a sharded model. Copy it before `fully_shard`, or copy its state_dict.",
        "`fully_shard` makes a class at run time, which pickle does not find. Pickle the model before, or use "
        "`torch.distributed.checkpoint`.",
        "`fully_shard` takes a module once, with one policy.",
        "Both spread the same parameters, and DDP meets FSDP2's DTensors. Use one of the two, or FSDP2 over a mesh of "
        "two dimensions.",
    )
    return [
        *(
            entry
            for name in (FSDP, FSDP_MIXED)
            for entry in (
                refusal(
                    ("deepcopy", name), AssertionError, "FSDP does not support deepcopy", deepcopy
                ),
                refusal(("pickle", name), PicklingError, "Can't pickle .*fsdp", pickled),
                refusal((name, "DDP"), Exception, "DTensor|sharding strategy", both),
            )
        ),
        refusal((FSDP, FSDP_MIXED), AssertionError, "fully_shard has already been applied", twice),
    ]
