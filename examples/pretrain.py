"""Pretrain a byte-level language model with experts on many ranks: FSDP2, experts over ranks, and stages of a pipeline.

    torchrun --nproc-per-node 8 examples/pretrain.py --ep 4 --out run   # begins from the last checkpoint, ends with one
    torchrun --nproc-per-node 8 examples/pretrain.py --pp 2 --chunks 2 --micro-batches 4 --memory 60
    torchrun --nproc-per-node 8 examples/pretrain.py --stock            # the same model of plain torch

Batches follow from the step and the rank, so that a run that is resumed on the same mesh goes on bit for bit.
"""

import argparse
import contextlib
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import distributed as fd
from fuseops import offload
from fuseops.demo.data import batch, read_corpus

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by name: other ranks have others
BALANCE = 0.01  # of the loss that evens out how many tokens experts get
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
    """What `fo.MoE` computes, in plain torch but for the way of its balance loss."""

    def __init__(self, dim: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(dim, experts, bias=False)
        self.fc1 = nn.Parameter(torch.empty(experts, 2 * ffn, dim).uniform_(-1, 1) / dim**0.5)
        self.fc2 = nn.Parameter(torch.empty(experts, dim, ffn).uniform_(-1, 1) / ffn**0.5)
        self.inject = fo.ops.InjectLoss("balance")  # adds to the loss that is trained

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        logits = self.router(rows).float()
        weights, chosen = logits.topk(self.top_k, -1)
        weights, y = weights.softmax(-1), torch.zeros_like(rows)
        for e, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2, strict=True)):
            token, place = (chosen == e).nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], fc1).chunk(2, -1)
            a = F.silu(gate) * up * weights[token, place, None]
            y = y.index_add(0, token, F.linear(a.to(fc2.dtype), fc2).to(y.dtype))
        share = chosen.flatten().bincount(minlength=len(self.fc1)) / chosen.numel()
        balance = len(self.fc1) * (share * logits.softmax(-1).mean(0)).sum()
        return self.inject(y.view_as(x), balance=BALANCE * balance)


class Block(nn.Module):
    def __init__(self, c: argparse.Namespace, number: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(c.dim, c.heads), nn.RMSNorm(c.dim)
        dense = c.dense_every and number % c.dense_every == c.dense_every - 1
        experts, top_k, hidden = (1, 1, c.ffn * c.top_k) if dense else (c.experts, c.top_k, c.ffn)
        if c.stock:  # of one expert, a dense layer
            self.mlp: nn.Module = StockExperts(c.dim, hidden, experts, top_k)
        elif dense:
            up, down = fo.ops.Linear(c.dim, 2 * hidden, False), fo.ops.Linear(hidden, c.dim, False)
            self.mlp = fo.Sequential(up, fo.ops.SwiGLU(), down)
        else:
            self.mlp = fo.MoE(c.dim, hidden, experts, top_k, balance_loss=BALANCE, aux="inject")

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(self.norm(x))


def seeded(seed: int, place: int, make: Any, *args: Any, **options: Any) -> Any:
    """A module whose first weights are the same whoever makes it."""
    torch.manual_seed(seed * 1_000_003 + place)
    return make(*args, **options)


class Stage(nn.Module):
    """Consecutive blocks, named and drawn as in the whole model; the first stage has embeddings, the last the head."""

    def __init__(self, c: argparse.Namespace, layers: range, bf16: bool) -> None:
        super().__init__()
        self.bf16, self.number = bf16, layers.start // len(layers)  # bf16: under autocast
        first = partial(seeded, c.seed)
        self.blocks = nn.ModuleDict({str(k): first(k, Block, c, k) for k in layers})
        if layers.start == 0:
            self.bytes = first(-1, nn.Embedding, 256, c.dim)
            self.places = first(-2, nn.Embedding, c.context, c.dim)
        if layers.stop == c.layers:
            self.norm, self.head = nn.RMSNorm(c.dim), first(-3, nn.Linear, c.dim, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            if hasattr(self, "bytes"):
                x = self.bytes(x) + self.places.weight[: x.shape[1]]
            for block in self.blocks.values():
                x = block(x)
            return self.head(self.norm(x)) if hasattr(self, "head") else x


class Part(nn.Module):
    """All stages of a rank as one model, for checkpoints, the optimizer and a scheduler of offload."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        for name, module in (pair for stage in stages for pair in stage.named_children()):
            self.add_module(name, module)
        self.blocks = nn.ModuleDict({k: m for s in stages for k, m in s.blocks.items()})


def stages_of(c: argparse.Namespace, rank: int, bf16: bool) -> list[Stage]:
    """Those of a rank, of `c.stages` equal parts of the blocks: dealt out in turn, or in a V."""
    each = c.layers // c.stages
    mine = [rank, 2 * c.pp - 1 - rank] if c.pairs else [rank + c.pp * k for k in range(c.chunks)]
    return [Stage(c, range(k * each, k * each + each), bf16) for k in mine]


def mesh_of(c: argparse.Namespace, device: str) -> DeviceMesh:
    """pp: stages of the model.  dp: ranks with the same experts.  ep: ranks with other experts, and other tokens."""
    data, rest = divmod(dist.get_world_size(), c.pp)
    ep = 1 if c.stock else (c.ep or data)
    if rest or data % ep:
        raise SystemExit(f"--pp {c.pp} x --ep {ep} does not divide {dist.get_world_size()} ranks")
    return init_device_mesh(device, (c.pp, data // ep, ep), mesh_dim_names=("pp", "dp", "ep"))


def spread_experts(model: nn.Module, c: argparse.Namespace, mesh: DeviceMesh) -> None:
    if mesh["ep"].size() > 1 and any(isinstance(m, fo.MoE) for m in model.modules()):
        tokens = c.batch * c.context // c.micro_batches
        style = fd.ExpertParallel(dispatcher=c.dispatcher, capacity=c.capacity, tokens=tokens)
        parallelize_module(model, mesh["ep"], style)


def spread(stage: Stage, c: argparse.Namespace, mesh: DeviceMesh, every: DeviceMesh) -> None:
    """Experts over `ep` ranks, everything over all that have this stage: gathered once a step by a pipeline."""
    spread_experts(stage, c, mesh)
    alone = mesh["dp"].size() == 1  # nobody holds the same experts
    ignored = {p for p in stage.parameters() if alone and type(p.data) is DTensor}
    place = None if alone or mesh["ep"].size() == 1 else fd.expert_placement(mesh["dp"])
    options: Any = {"shard_placement_fn": place, "ignored_params": ignored}
    for module in [*stage.blocks.values(), stage]:
        fully_shard(module, mesh=every, reshard_after_forward=c.pp == 1, **options)


def loss_of(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), text.flatten())


class Run:
    """A model, its optimizer, and how far it has come."""

    def __init__(self, c: argparse.Namespace, device: torch.device) -> None:
        self.c, self.device, self.step = c, device, 0
        self.mesh = mesh_of(c, device.type)
        self.every = self.mesh["dp", "ep"]._flatten("every")
        with device:
            self.stages = stages_of(c, self.mesh.get_local_rank("pp"), device.type == "cuda")
        self.model = Part(self.stages)
        self.size = self.active = sum(p.numel() for p in self.model.parameters())
        experts = sum(p.numel() for p in self.model.parameters() if p.dim() == 3)
        self.active -= experts * (c.experts - c.top_k) // c.experts
        for stage in self.stages:
            spread(stage, c, self.mesh, self.every)
        self.schedule = self.pipeline() if c.pp > 1 else None
        groups = fd.param_groups(self.model, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=True)
        self.text = read_corpus().train.to(device)

    def pipeline(self) -> Any:
        c = self.c
        where: Any = {"device": self.device, "group": self.mesh["pp"].get_group()}
        stages = [pipelining.PipelineStage(s, s.number, c.stages, **where) for s in self.stages]
        if c.chunks == 1:
            return pipelining.Schedule1F1B(stages[0], c.micro_batches, loss_fn=loss_of)
        kind = pipelining.ScheduleDualPipeV if c.pairs else pipelining.ScheduleInterleaved1F1B
        schedule = kind(stages, c.micro_batches, loss_fn=loss_of)  # type: ignore[arg-type]
        if c.pairs:
            fd.overlap_pairs(schedule)
        return schedule

    def train(self) -> Tensor:
        """One step, whose end the host does not wait for.   -> the mean loss of all ranks"""
        world, rank = self.every.size(), self.every.get_local_rank()
        seed = (self.c.seed * 1_000_003 + self.step) * world + rank  # alike on all of a pipeline
        draw = torch.Generator(self.device).manual_seed(seed)
        text = batch(self.text, self.c.batch, self.c.context, draw)
        self.optimizer.zero_grad()
        mean = self.backward(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        fd.clip_grad_norm_(self.model.parameters(), 1.0, over=self.mesh["pp"])
        self.optimizer.step()
        self.step += 1
        dist.all_reduce(mean)
        return mean / world

    def backward(self, text: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean over micro-batches.   -> the loss, zero but on the last rank of a pipeline"""
        first, last = (any(hasattr(s, name) for s in self.stages) for name in ("bytes", "head"))
        if self.schedule is None:
            loss = loss_of(self.stages[0](text), targets)
            torch.autograd.backward(loss)
            return loss.detach()
        losses, target = list[Tensor](), targets if last else None
        self.schedule.step(*[text] * first, target=target, losses=losses, return_outputs=False)
        return (torch.stack(losses) if last else torch.zeros(1, device=self.device)).mean().detach()

    def scheduler(self) -> Any:
        """What keeps a step within `c.memory` GiB: of a pipeline by the plan of this rank."""
        budget = int(self.c.memory * 2**30)
        if self.schedule is None:
            hardware = self.hardware()
            return offload.Scheduler(self.stages[0], "blocks.*", peak=budget, hardware=hardware)
        # The plan has weights and gradients whole, as in a step. Shards and AdamW's moments come on top.
        mine = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        held = sum(4 * p.numel() * p.element_size() for p in mine)
        plan = self.plans(peak=max(budget - held, 0))[self.mesh.get_local_rank("pp")]
        return offload.Scheduler(self.model, layers="blocks.*", plan=plan)

    def plans(self, peak: int | None = None, **more: Any) -> tuple[offload.OffloadPlan, ...]:
        """One of every rank of a pipeline, from a dry run of a micro-batch; else this rank's, from a recorded step."""
        c, hardware = self.c, self.hardware()
        options: dict[str, Any] = {"layers": "blocks.*", "hardware": hardware} | more
        if self.schedule is None:
            text = torch.zeros(c.batch, c.context, dtype=torch.long, device=self.device)
            options |= {"record": True, "peak": peak, "loss": lambda y: loss_of(y, text)}
            return (offload.plan(self.stages[0], text, **options),)
        with torch.device("meta"):
            whole = Stage(c, range(c.layers), self.device.type == "cuda")
            text = torch.zeros(c.batch // c.micro_batches, c.context, dtype=torch.long)
        spread_experts(whole, c, self.mesh)
        profile = offload.plan(whole, text, **options).profile
        dealt = offload.Pipeline(c.pp, c.micro_batches, c.chunks)
        pipeline = offload.Pipeline.of(self.schedule) if c.pairs else dealt
        return offload.plan_pipeline(profile, hardware, pipeline, offload.Limits(peak))

    def hardware(self) -> offload.Hardware:
        """The slowest link of all ranks while they copy, so that all plan alike, and some room; on CPUs an H200's."""
        if self.device.type == "cuda":
            return offload.Hardware.measure(dist.group.WORLD).slower(1.1)
        return replace(offload.Hardware.h200(), arch=0)

    def save(self) -> None:
        """All of it, in a folder that has its name once it is whole."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        made = self.c.out / f"step-{self.step:08d}"
        save({"model": model, "optimizer": optimizer}, checkpoint_id=made.with_suffix(".new"))
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)
            made.with_suffix(".new").rename(made)
        dist.barrier()

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one, on whatever mesh it was written."""
        found = sorted(p for p in self.c.out.glob("step-*") if not p.suffix) if self.c.out else []
        if not found:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=found[-1])  # in place
        states: Any = {"model_state_dict": model, "optim_state_dict": optimizer}
        set_state_dict(self.model, self.optimizer, **states, options=FLAT)
        self.step = int(found[-1].name.removeprefix("step-"))


def tell(said: str) -> None:
    if dist.get_rank() == 0:
        print(said, flush=True)


def log(run: Run, loss: float, seconds: float) -> None:
    rate = run.c.batch * run.c.context / seconds
    said = f"step {run.step} loss {loss:.6f} {rate / run.c.pp:,.0f} tokens/s a rank"
    if run.device.type == "cuda":
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30
        said += f" MFU {6 * run.active * rate / PEAK_FLOPS:.1%} peak {peak:.2f} GiB"
    tell(said)


def parsed(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    for name, n, said in (
        ("steps", 6, "of the run"), ("lr", 1e-3, "of AdamW"), ("heads", 4, "of attention"), ("ffn", 64, "of an expert"),
        ("layers", 2, "in all"), ("experts", 8, "a layer"), ("top-k", 2, "experts a token"), ("seed", 0, "of all"),
        ("context", 64, "tokens a text"), ("batch", 4, "texts a rank"), ("dense-every", 0, "layers; 0: none is dense"),
        ("ep", 0, "ranks that share experts; 0: all"), ("pp", 1, "ranks a pipeline"), ("chunks", 1, "stages a rank"),
        ("micro-batches", 1, "a step"), ("every", 100, "steps a checkpoint"), ("show", 10, "steps a printed line"),
        ("dim", 64, "of a token"), ("capacity", 1.5, "of dispatchers but host_counts, over even routing"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(n), default=n, help=f"{said} (%(default)s)")
    parser.add_argument("--dispatcher", help="how tokens travel to their experts")
    parser.add_argument("--out", type=Path, help="folder of checkpoints")
    parser.add_argument("--memory", type=float, metavar="GiB", help="of a step, with offload")
    parser.add_argument("--pairs", action="store_true", help="stages in a V, run in turns")
    parser.add_argument("--stock", action="store_true", help="experts of plain torch everywhere")
    c = parser.parse_args(args)
    for name, value in vars(c).items():
        # 0 only where it is the default
        if type(value) is int and value < (parser.get_default(name) > 0):
            parser.error(f"--{name.replace('_', '-')} is {value}, which is too few")
    if (c.micro_batches > 1 or c.chunks > 1 or c.pairs) and c.pp == 1:
        parser.error("--micro-batches, --chunks and --pairs go through a pipeline: --pp")
    c.chunks = 2 if c.pairs else c.chunks
    c.stages = c.pp * c.chunks
    for size, parts in (("dim", "heads"), ("batch", "micro_batches"), ("layers", "stages")):
        if vars(c)[size] % vars(c)[parts]:
            parser.error(f"--{size} {vars(c)[size]} is no multiple of {vars(c)[parts]} {parts}")
    return c


def train(c: argparse.Namespace, device: torch.device) -> list[float]:
    """The losses of the steps up to `c.steps`."""
    run, losses = Run(c, device), list[Tensor]()
    run.resume()
    size, share = f"{run.size:,} parameters a stage", f"{run.active:,} of them for a token"
    mesh = "stages {} x replicas {} x parts of the experts {}".format(*run.mesh.shape)
    tell(f"{mesh}: {size}, {share}; {run.step} of {c.steps} steps are done")
    begun, done = time.perf_counter(), run.step
    with run.scheduler() if c.memory is not None else contextlib.nullcontext() as scheduler:
        while run.step < c.steps:
            losses.append(run.train())
            if scheduler and len(losses) == 1:  # it is made at the first forward
                tell("\n".join([repr(scheduler.plan), *scheduler.plan.warnings]))
            show, save = ((run.step % n == 0 or run.step == c.steps) for n in (c.show, c.every))
            if show or save:
                fd.check_overflow()  # waits for the device, which other steps do not
                if show:
                    log(run, float(losses[-1]), (time.perf_counter() - begun) / (run.step - done))
                if save and c.out:
                    run.save()
                begun, done = time.perf_counter(), run.step
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29512"}
    os.environ.update(alone | {"MASTER_ADDR": "localhost"} | os.environ)
    where = torch.device("cpu")
    if torch.cuda.is_available():
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    train(parsed(), where)
    dist.destroy_process_group()
