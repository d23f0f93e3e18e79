"""Laws of experts over ranks beside FSDP2, on four ranks: two hold the same experts, two have others."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_laws import close, layer, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fuseops.distributed import ExpertParallel, clip_grad_norm_, expert_placement, param_groups

D, TOKENS, STEPS = 6, 5, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.blocks = nn.ModuleList(layer(seed, shared_experts=1) for seed in (3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def spread(dp: int, ep: int) -> Net:
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    every = mesh._flatten(f"every{dp}")
    model = net()
    parallelize_module(model, mesh["ep"], ExpertParallel())
    place = expert_placement(mesh["dp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=every, shard_placement_fn=place)
    return model


def trained(model: Net, batches: Any, clip: Any, optimizer: Any) -> list[Tensor]:
    """The norms of the gradients of every step."""
    norms = []
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms.append(clip(model.parameters(), 0.05))
        optimizer.step()
    return norms


def batches() -> list[Tensor]:
    """(world, TOKENS, D) of every step."""
    torch.manual_seed(6)
    return [
        torch.randn(dist.get_world_size(), TOKENS, D, dtype=torch.float64) for _ in range(STEPS)
    ]


def adamw(model: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.01, fused=True)


def law_steps_and_checkpoints_equal_one_process() -> None:
    alone, model = net(), spread(2, 2)
    one, many = adamw(alone), adamw(model)
    want = trained(alone, [x.flatten(0, 1) for x in batches()], nn.utils.clip_grad_norm_, one)
    got = trained(model, [x[dist.get_rank()] for x in batches()], clip_grad_norm_, many)
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, "norm")
    same_weights(model, alone)
    with SharedFolder() as folder:
        weights, state = get_state_dict(model, many)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        for other in (spread(1, 4), spread(2, 2)):
            optimizer = adamw(other)
            weights, state = get_state_dict(other, optimizer)
            dcp.load(loaded := {"model": weights, "optim": state}, checkpoint_id=folder)
            set_state_dict(
                other,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optim"],
            )
            same_weights(other, alone)
            same_states(other, optimizer, alone, one)
        if dist.get_rank() == 0:
            plain = {n: torch.full_like(t, float("nan")) for n, t in alone.state_dict().items()}
            dcp.load(read := {"model": plain}, checkpoint_id=folder, no_dist=True)
            for name, t in alone.state_dict().items():
                close(read["model"][name], t, name)
        dist.barrier()


def law_pretraining_resumes_bit_for_bit() -> None:
    """From a checkpoint in the middle, on the same mesh; on another mesh, within rounding."""
    path = Path(__file__).resolve().parents[2] / "examples" / "pretrain.py"
    spec: Any = importlib.util.spec_from_file_location("pretrain", path)
    spec.loader.exec_module(pretrain := importlib.util.module_from_spec(spec))
    cpu = torch.device("cpu")
    with SharedFolder() as folder:

        def losses(*options: str) -> list[float]:
            given = ["--dim", "16", "--layers", "1", "--context", "16", "--batch", "2", *options]
            return pretrain.train(pretrain.parsed(given), cpu)

        out = ["--out", str(folder)]
        whole = losses("--ep", "2", "--steps", "4")
        assert losses("--ep", "2", "--steps", "2", *out) == whole[:2]
        dist.barrier()
        assert losses("--ep", "2", "--steps", "3", *out) == whole[2:3]
        other = losses("--ep", "4", "--steps", "4", *out)
        assert len(other) == 1 and abs(other[0] - whole[3]) < 1e-5


def same_weights(model: Net, alone: Net) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        close(whole(p).detach(), q.detach(), name)


def same_states(model: Net, optimizer: Any, alone: Net, one: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            close(
                whole(optimizer.state[p][key]).float(), one.state[q][key].float(), f"{name} {key}"
            )


class SharedFolder:
    """A folder of all ranks."""

    def __enter__(self) -> Path:
        self.mine = tempfile.TemporaryDirectory()
        path = [self.mine.name]
        dist.broadcast_object_list(path, src=0)
        return Path(path[0])

    def __exit__(self, *raised: object) -> None:
        dist.barrier()
        self.mine.cleanup()
