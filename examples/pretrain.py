"""Pretrain a byte-level language model with experts on many ranks: FSDP2 beside experts over ranks.

    torchrun --nproc-per-node 8 examples/pretrain.py --ep 4 --out run   # begins from the last checkpoint, ends with one
    torchrun --nproc-per-node 8 examples/pretrain.py --stock            # the same model of plain torch

Batches follow from the step and the rank, so that a run that is resumed on the same mesh goes on bit for bit.
"""

import argparse
import contextlib
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import distributed as fd
from fuseops import offload
from fuseops.demo.data import batch, read_corpus

PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200, for the share that is used


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class StockExperts(nn.Module):
    """What `fo.MoE` computes, in plain torch."""

    def __init__(self, dim: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(dim, experts, bias=False)
        self.fc1 = nn.Parameter(torch.empty(experts, 2 * ffn, dim).uniform_(-1, 1) / dim**0.5)
        self.fc2 = nn.Parameter(torch.empty(experts, dim, ffn).uniform_(-1, 1) / ffn**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().topk(self.top_k, -1)
        weights, y = weights.softmax(-1), torch.zeros_like(rows)
        for e, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2, strict=True)):
            token, place = (chosen == e).nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], fc1).chunk(2, -1)
            a = F.silu(gate) * up * weights[token, place, None]
            y = y.index_add(0, token, F.linear(a.to(fc2.dtype), fc2).to(y.dtype))
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, c: argparse.Namespace) -> None:
        super().__init__()
        self.attention, self.norm = Attention(c.dim, c.heads), nn.RMSNorm(c.dim)
        sizes = c.dim, c.ffn, c.experts, c.top_k
        self.moe = (
            StockExperts(*sizes) if c.stock else fo.MoE(*sizes, balance_loss=0.01, aux="inject")
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self, c: argparse.Namespace) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, c.dim), nn.Embedding(c.context, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.dim), nn.Linear(c.dim, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def spread(model: nn.Module, c: argparse.Namespace, device: str) -> None:
    """Experts over `ep` ranks, everything over all of them."""
    world = dist.get_world_size()
    ep = 1 if c.stock else (c.ep or world)
    mesh = init_device_mesh(device, (world // ep, ep), mesh_dim_names=("dp", "ep"))
    if ep > 1:
        parallelize_module(model, mesh["ep"], fd.ExpertParallel(tokens=c.batch * c.context))
    every, place = mesh._flatten("every"), None
    ignored: set[nn.Parameter] = set()
    if ep == world:  # nobody holds the same experts
        ignored |= {p for p in model.parameters() if type(p.data) is DTensor}
    elif ep > 1:
        place = fd.expert_placement(mesh["dp"])
    for module in [*model.get_submodule("blocks").children(), model]:
        fully_shard(module, mesh=every, shard_placement_fn=place, ignored_params=ignored)


class Run:
    """A model, its optimizer, and how far it has come."""

    def __init__(self, c: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(c.seed)
        self.c, self.device, self.step = c, device, 0
        with device:
            self.model = Model(c)
        self.active = sum(p.numel() for p in self.model.parameters())
        experts = sum(p.numel() for p in self.model.parameters() if p.dim() == 3)
        self.active -= experts * (c.experts - c.top_k) // c.experts
        spread(self.model, c, device.type)
        groups = fd.param_groups(self.model, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=True)
        self.text = read_corpus().train

    def train(self) -> float:
        """One step.   -> the mean loss of all ranks"""
        seed = (self.c.seed * 1_000_003 + self.step) * dist.get_world_size() + dist.get_rank()
        draw = torch.Generator().manual_seed(seed)
        text = batch(self.text, self.c.batch, self.c.context, draw).to(self.device)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        torch.autograd.backward(loss)
        fd.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        fd.check_overflow()
        return float(mean) / dist.get_world_size()

    def save(self) -> None:
        """All of it, in a folder that has its name once it is whole."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        made = self.c.out / f"step-{self.step:08d}"
        save({"model": model, "optimizer": optimizer}, checkpoint_id=made.with_suffix(".new"))
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)
            made.with_suffix(".new").rename(made)
        dist.barrier()

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one, on whatever mesh it was written."""
        found = sorted(p for p in self.c.out.glob("step-*") if not p.suffix)
        if not found:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=found[-1])  # in place
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.step = int(found[-1].name.removeprefix("step-"))


def log(run: Run, loss: float, seconds: float) -> None:
    c, cuda = run.c, run.device.type == "cuda"
    rate = c.batch * c.context / seconds
    said = f"step {run.step} loss {loss:.6f} {rate:,.0f} tokens/s a rank"
    if cuda:
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30
        said += f" MFU {6 * run.active * rate / PEAK_FLOPS:.1%} peak {peak:.2f} GiB"
    if dist.get_rank() == 0:
        print(said, flush=True)


def parsed(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("steps", 6), ("dim", 64), ("heads", 4), ("layers", 2), ("ffn", 64), ("experts", 8), ("top-k", 2),
        ("context", 64), ("batch", 4), ("ep", 0), ("every", 100), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="folder of checkpoints")
    parser.add_argument(
        "--memory", metavar="GiB", help="what a step may take; the rest is offloaded"
    )
    parser.add_argument(
        "--stock", action="store_true", help="experts of plain torch, on every rank"
    )
    return parser.parse_args(args)


def train(c: argparse.Namespace, device: torch.device) -> list[float]:
    """The losses of the steps up to `c.steps`."""
    run, losses = Run(c, device), []
    if c.out:
        run.resume()
    budget: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if c.memory:
        budget = offload.Scheduler(run.model, layers="blocks.*", peak=f"{c.memory}GiB")
    with budget:
        while run.step < c.steps:
            begun = time.perf_counter()
            losses.append(run.train())
            log(run, losses[-1], time.perf_counter() - begun)
            if c.out and (run.step % c.every == 0 or run.step == c.steps):
                run.save()
    return losses


if __name__ == "__main__":
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29512)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    where = torch.device("cpu")
    if torch.cuda.is_available():
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    train(parsed(), where)
    dist.destroy_process_group()
