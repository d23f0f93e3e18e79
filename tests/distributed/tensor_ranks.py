"""What two ranks of tensor parallelism do, beside one process: outputs, every gradient, steps, checkpoints."""

from __future__ import annotations

import copy
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel import style as styles
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import distributed, offload, torch_private

D, F, TOKENS = 6, 8, 4


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def mlp(act: fo.ops.Op = None, bias: bool = True, norm: Any = fo.ops.RMSNorm) -> fo.Residual:  # type: ignore[assignment]
    act = act or fo.ops.SwiGLU()
    hidden = 2 * F if type(act).__name__.endswith("GLU") else F
    linear = partial(fo.ops.Linear, bias=bias)
    return fo.Residual(norm(D), linear(D, hidden), act, linear(F, D)).double()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        path = [mine]
        dist.broadcast_object_list(path, src=0)
        yield Path(path[0])
        dist.barrier()


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def randomised(model: nn.Module) -> nn.Module:
    """Parameters that are all different, the same on every rank."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.7, 0.7)
    return model


def same_gradients(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, p in expected.named_parameters():
        mine, want = found[name].grad, p.grad
        assert (mine is None) == (want is None), name
        if mine is not None:
            torch.testing.assert_close(whole(mine).reshape(want.shape), want, msg=name)


def compare(
    model: nn.Module,
    parallel: nn.Module,
    x: Tensor,
    *,
    sequence: int | None = None,
    run: Callable[..., Tensor] = lambda model, x: model(x),
) -> None:
    """Outputs and all gradients of both; sequence: the axis of x and y that is sharded."""
    rank = dist.get_rank()

    def part(t: Tensor) -> Tensor:
        return t if sequence is None else t.chunk(2, sequence)[rank]

    x = x.detach().requires_grad_()
    y = run(model, x)
    (y.square().sum() + y.sum()).backward()
    mine = part(x.detach()).clone().requires_grad_()
    got = run(parallel, mine)
    torch.testing.assert_close(got, part(y))
    (got.square().sum() + got.sum()).backward()
    torch.testing.assert_close(mine.grad, part(x.grad))  # type: ignore[arg-type]
    same_gradients(parallel, model)


def parallelized(model: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    return parallelize_module(model, mesh(), distributed.tp_plan(model, **options))


# --- equal to one process


def law_mlps() -> None:
    acts = (fo.ops.SwiGLU(), fo.ops.GEGLU(), fo.ops.GELU(), fo.ops.SReLU())
    both = (True, False)
    cases = [*itertools.product(acts[:1], both, both), *itertools.product(acts[1:], both)]
    for act, bias, *rest in cases:
        sequence = rest[0] if rest else not bias
        norm = fo.ops.LayerNorm if bias else fo.ops.RMSNorm
        model = randomised(mlp(act, bias, norm))
        x = torch.randn(3, TOKENS, D).double() if bias else torch.randn(TOKENS, D).double()
        parallel = parallelized(model, sequence_parallel=sequence)
        compare(model, parallel, x, sequence=-2 if sequence else None)
        assert [*parallel.state_dict()] == [*model.state_dict()]


def law_a_bias_of_its_own_and_blocks_in_blocks() -> None:
    inner = fo.Sequential(
        {
            "up": fo.ops.Linear(D, 2 * F, bias=False),
            "bias": fo.ops.Bias(2 * F),
            "act": fo.ops.SwiGLU(),
            "down": fo.ops.Linear(F, D, bias=False),
            "last": fo.ops.Bias(D),
        }
    )
    model = randomised(fo.Sequential(fo.Residual(fo.ops.RMSNorm(D), inner), mlp()).double())
    for sequence in (False, True):
        plan = distributed.tp_plan(model, sequence_parallel=sequence)
        if sequence:
            plan["0.0"] = distributed.SequenceParallel()
        parallel = parallelize_module(copy.deepcopy(model), mesh(), plan)
        compare(
            model,
            parallel,
            torch.randn(2 * TOKENS, D).double(),
            sequence=-2 if sequence else None,
        )
        model.zero_grad()


def law_what_stands_beside_blocks_works_on_their_tokens() -> None:
    """Norms, biases and the head beside blocks that hold the MLPs have styles, as those beside an MLP have."""
    norm, bias = fo.ops.RMSNorm(D), fo.ops.Bias(D)
    stack = randomised(fo.Sequential(mlp(), norm, fo.Residual(mlp()), bias).double())
    x = torch.randn(2, 2 * TOKENS, D).double()
    compare(stack, parallelized(stack, sequence_parallel=True), x, sequence=-2)
    head = fo.ops.LinearCrossEntropy(D, 7)
    model = randomised(fo.Sequential(mlp(), fo.ops.LayerNorm(D), head).double())
    parallel = parallelized(model, sequence_parallel=True)
    targets = torch.arange(4 * TOKENS).view(2, -1) % 7
    loss = model(x, targets=targets)
    got = parallel(x.chunk(2, -2)[dist.get_rank()], targets=targets)
    torch.testing.assert_close(got, loss)
    loss.backward()
    got.backward()
    same_gradients(parallel, model)


def law_experts() -> None:
    """Grouped MLPs, whose probabilities are a side input, and a whole MoE layer with shared experts."""
    for bias, low_rank in ((False, None), (True, None), (True, 2)):
        model = fo.Sequential(
            {
                "fc1": fo.ops.GroupedLinear(3, D, 2 * F, bias=bias, low_rank=low_rank),
                "act": fo.ops.ScaledSwiGLU(),
                "fc2": fo.ops.GroupedLinear(3, F, D, bias=bias, scale_bias=True, low_rank=low_rank),
            }
        ).double()
        randomised(model)
        probs = torch.rand(7, dtype=torch.float64)
        asked = {}

        def run(model: nn.Module, x: Tensor, probs: Tensor = probs, asked: Any = asked) -> Tensor:
            asked[id(model)] = mine = probs.clone().requires_grad_()
            return model(x, fo.Routing.from_counts([2, 0, 5], mine))

        compare(model, parallelized(model), torch.randn(7, D).double(), run=run)
        first, second = asked.values()
        torch.testing.assert_close(first.grad, second.grad)
    for shared, bias in ((0, True), (1, False)):
        moe = fo.MoE(D, F, 4, 2, shared_experts=shared, bias=bias, aux="inject").double()
        randomised(moe)
        parallel = parallelized(moe)
        compare(moe, parallel, torch.randn(9, D).double())
        alone = copy.deepcopy(parallel)  # the activation, which has no parameters, by itself
        alone["act"].register_forward_hook(lambda *_: None)
        for model, scope in ((parallel, fo.reference()), (alone, fo.fusion())):
            moe.zero_grad()
            model.zero_grad()
            with scope:
                compare(moe, model, torch.randn(9, D).double())
        spans = [span.rule for span in parallel.plan(torch.randn(9, D).double()).forward]
        assert "routed_mlp" in spans


def law_single_products() -> None:
    """Linear and GroupedLinear that are called alone, with their collectives."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = fo.ops.Linear(D, 3 * F)
            self.out = fo.ops.Linear(F, D)
            self.head = fo.ops.Linear(D, 2 * F)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3)).unbind(-1)
            return self.head(self.out(q * k.sigmoid() * v))

    model = randomised(Attention().double())
    for tokens in (Replicate(), Shard(-2)):
        plan = {
            "qkv": distributed.ColwiseParallel(input_layouts=tokens),
            "out": distributed.RowwiseParallel(output_layouts=tokens),
            "head": distributed.ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        }
        parallel = parallelize_module(copy.deepcopy(model), mesh(), plan)
        x = torch.randn(2, TOKENS, D).double()
        y = model(x)
        mine = x if tokens == Replicate() else x.chunk(2, -2)[dist.get_rank()]
        torch.testing.assert_close(parallel(mine), y)
    del plan["head"]
    plan["out"] = distributed.RowwiseParallel()
    plan["qkv"] = distributed.ColwiseParallel()
    compare(model, parallelize_module(copy.deepcopy(model), mesh(), plan), x)
    grouped = randomised(fo.ops.GroupedLinear(3, D, F, scale_bias=True).double())
    style = distributed.ColwiseParallel(output_layouts=Replicate())
    asked = [torch.rand(7, dtype=torch.float64).requires_grad_()]
    asked.append(asked[0].detach().clone().requires_grad_())
    given = iter(asked)
    compare(
        grouped,
        parallelize_module(copy.deepcopy(grouped), mesh(), style),
        torch.randn(7, D).double(),
        run=lambda model, x: model(x, fo.Routing.from_counts([2, 0, 5], next(given))),
    )
    torch.testing.assert_close(asked[1].grad, asked[0].grad)


def law_collectives_of_ops() -> None:
    rank = dist.get_rank()
    parts = [torch.randn(2, 4, 3).double() for _ in range(2)]
    weights = [torch.randn(2, 8, 3).double() for _ in range(2)]

    def grads(op: fo.ops.Op, weight: Any) -> tuple[Tensor, Tensor]:
        x = parts[rank].clone().requires_grad_()
        for model in (fo.Sequential(op), op):
            with fo.reference() if model is op else fo.fusion():
                y = model(x)
                x.grad = None
                (y * weight(y, rank)).sum().backward()
        return y.detach(), x.grad  # type: ignore[return-value]

    for dim in (-2, 1):
        y, dx = grads(fo.ops.AllGather(mesh(), dim), lambda y, r: weights[r])
        assert torch.equal(y, torch.cat(parts, 1))
        torch.testing.assert_close(dx, sum(weights).chunk(2, 1)[rank])  # type: ignore[union-attr]
        y, dx = grads(fo.ops.AllGather(mesh(), dim, grad="replicate"), lambda y, r: weights[0])
        assert torch.equal(dx, weights[0].chunk(2, 1)[rank])
        y, dx = grads(fo.ops.ReduceScatter(mesh(), dim), lambda y, r: weights[r][:, :2])
        torch.testing.assert_close(y, sum(parts).chunk(2, 1)[rank])  # type: ignore[union-attr]
        assert torch.equal(dx, torch.cat([w[:, :2] for w in weights], 1))
    y, dx = grads(fo.ops.AllReduce(dist.group.WORLD), lambda y, r: weights[0][:, :4])
    torch.testing.assert_close(y, sum(parts))
    assert torch.equal(dx, weights[0][:, :4])
    back = fo.ops.AllReduce(mesh(), forward=False, backward=True)
    y, dx = grads(back, lambda y, r: weights[r][:, :4])
    assert torch.equal(y, parts[rank])
    torch.testing.assert_close(dx, sum(weights)[:, :4])  # type: ignore[index]
    try:
        fo.ops.ReduceScatter(mesh(), dim=-1)(parts[rank])
    except fo.FuseOpsError as error:
        assert "3 does not divide by 2 ranks" in str(error)
    else:
        raise AssertionError("a part of a row was sent")


# --- features beside it


def law_delayed_weight_gradients() -> None:
    x = torch.randn(2 * TOKENS, D).double()
    for sequence in (False, True):
        model = randomised(mlp())
        parallel: Any = parallelized(model, sequence_parallel=sequence)
        for op in parallel:
            if isinstance(op, fo.ops.Linear | fo.ops.RMSNorm):
                op.delays = ("weight",)
        model(x).square().sum().backward()
        loss = parallel(x.chunk(2)[dist.get_rank()] if sequence else x).square().sum()
        asked = torch.autograd.grad(
            loss, [parallel[1].weight, parallel[3].weight], retain_graph=True
        )
        loss.backward()
        early = parallel[1].weight.grad  # zeros, where torch's DTensor makes them of nothing (2.11)
        assert early is None or not early.full_tensor().any()
        assert parallel[1].bias.grad is not None
        assert parallel.backward_dw() == 3
        same_gradients(parallel, model)
        for given, op in zip(asked, (parallel[1], parallel[3]), strict=True):
            torch.testing.assert_close(whole(given), whole(op.weight.grad))


def law_recomputation_and_offload() -> None:
    x = torch.randn(2, 2 * TOKENS, D).double()
    for sequence in (False, True):
        model = randomised(fo.Sequential(mlp(), mlp()))
        parallel = parallelized(model, sequence_parallel=sequence)

        def run(model: Any, x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)

        compare(model, parallel, x, sequence=-2 if sequence else None, run=run)
        model.zero_grad()
        parallel.zero_grad()
        policy = offload.Policy(min_bytes=1)
        with offload.Scheduler(parallel, "*", policy=policy, lag=1) as scheduler:
            compare(model, parallel, x, sequence=-2 if sequence else None)
        assert dict(scheduler.report().schedule)["out_bytes"] > 0


def law_features_of_one_process_hold_over_local_tensors() -> None:
    """Accumulation, frozen weights, copies, torch.compile, autocast and a recipe."""
    x = torch.randn(2 * TOKENS, D).double()

    def twice(model: nn.Module, x: Tensor) -> Tensor:
        model(x).sum().backward()
        return model(x)

    def checked(sequence: bool, run: Any = lambda m, x: m(x), change: Any = lambda m: m) -> None:
        model = change(randomised(mlp()))
        parallel = change(parallelized(randomised(mlp()), sequence_parallel=sequence))
        compare(model, parallel, x, sequence=-2 if sequence else None, run=run)

    def frozen(model: nn.Module) -> nn.Module:
        model[1].requires_grad_(False)  # type: ignore[index]
        model[3].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        return model

    for sequence in (False, True):
        checked(sequence, twice)
        checked(sequence, change=frozen)
        checked(sequence, change=copy.deepcopy)
        compiled = parallelized(randomised(mlp()), sequence_parallel=sequence)
        compiled.compile(backend="aot_eager", fullgraph=True)
        compare(randomised(mlp()), compiled, x, sequence=-2 if sequence else None)
    wide = fo.Sequential(fo.ops.Linear(128, 512), fo.ops.SwiGLU(), fo.ops.Linear(256, 128))
    rows = torch.randn(32, 128)
    for sequence in (False, True):
        parallel = parallelized(randomised(wide), sequence_parallel=sequence)
        part = (lambda t: t.chunk(2)[dist.get_rank()]) if sequence else (lambda t: t)
        for scope in (
            torch.autocast("cpu", torch.bfloat16),
            fo.recipe(fo.recipes.Float8BlockScaling(), strict=True),
        ):
            with scope:
                mine, theirs = parallel(part(rows)), wide(rows)
                theirs.sum().backward()
                mine.sum().backward()
            assert float((mine - part(theirs)).norm() / theirs.norm()) < 0.02
            for name, p in wide.named_parameters():
                got = whole(parallel.get_parameter(name).grad).reshape(p.shape)
                assert float((got - p.grad).norm() / p.grad.norm()) < 0.05, name  # type: ignore[union-attr]
            wide.zero_grad()
            parallel.zero_grad()


def law_sizes_of_compiled_code_are_dynamic() -> None:
    """Two MLPs with one activation, whose formula has numbers of its own."""
    model = randomised(fo.Sequential(*(mlp(fo.ops.GEGLU(), bias=False) for _ in range(2))))
    parallel = parallelized(model)
    parallel.compile(backend="eager", dynamic=True)
    compare(model, parallel, torch.randn(TOKENS, D).double())


def law_a_gradient_is_differentiated_over_ranks() -> None:
    """By `fo.reference()`, for every collective that a style has."""

    def penalty(model: nn.Module, x: Tensor, c: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        with fo.reference():
            (dx,) = torch.autograd.grad((c * model(x)).sum(), x, create_graph=True)
        dx.square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(3)
    x = torch.randn(2 * TOKENS, D).double()
    for sequence in (False, True):
        model = randomised(fo.Sequential(mlp(), mlp(bias=False)))
        parallel = parallelized(model, sequence_parallel=sequence)
        rank = dist.get_rank()
        part = (lambda t, rank=rank: t.chunk(2)[rank]) if sequence else (lambda t: t)
        want = penalty(model, x, x.cos())
        torch.testing.assert_close(penalty(parallel, part(x), part(x.cos())), part(want))
        same_gradients(parallel, model)
    moe = randomised(fo.MoE(D, F, 4, 2, shared_experts=1, bias=True).double())
    want, parallel = penalty(moe, x, x.cos()), parallelized(moe)
    torch.testing.assert_close(penalty(parallel, x, x.cos()), want)
    same_gradients(parallel, moe)


def law_plans_say_what_runs_and_fuse_local_tensors() -> None:
    model = fo.Sequential(
        fo.ops.RMSNorm(D), fo.ops.Linear(D, F), fo.ops.SReLU(), fo.ops.Linear(F, D)
    ).double()
    x = torch.randn(TOKENS, D).double()
    fused = [span.rule for span in model[1:].plan(x).forward if span.rule]
    parallel = parallelized(model, sequence_parallel=True)
    plan = parallel.plan(x[:2].clone().requires_grad_())
    assert fused and [span.rule for span in plan.forward if span.rule] == fused
    text = str(plan)
    assert "1.AllGather" in text and "3.ReduceScatter" in text and "DTensor" not in text
    saved = {t.name: t for t in plan.saved}
    assert saved["1.x"].nbytes == x.numel() * 8 and not saved["1.x"].is_param
    assert sum(t.is_param for t in plan.saved) == 3


def law_a_dtensor_at_the_border_is_laid_out_as_the_first_op_takes_it() -> None:
    """Over the mesh of the ops and over one that has it as a dimension, before an MLP and before routed experts."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    x, moe = torch.randn(TOKENS, D).double(), randomised(fo.MoE(D, F, 4, 2).double())
    leaf = x.clone().requires_grad_()
    for model, sequence in ((randomised(mlp()), False), (randomised(mlp()), True), (moe, False)):
        plan = distributed.tp_plan(model, sequence_parallel=sequence)
        parallel = parallelize_module(copy.deepcopy(model), both["tp"], plan)
        expected = model(leaf)
        (want,) = torch.autograd.grad(expected.square().sum(), leaf)
        for placement in (Replicate(), Shard(0), Shard(1)):
            for over in (both["tp"], both):
                spread = distribute_tensor(x, over, [Replicate()] * (over.ndim - 1) + [placement])
                y = parallel(spread.requires_grad_())
                mine = expected.chunk(2)[dist.get_rank()] if sequence else expected
                torch.testing.assert_close(y, mine)
                y.square().sum().backward()
                torch.testing.assert_close(whole(spread.grad), want)
    foreign = distribute_tensor(x, other, [Replicate(), Shard(0)])
    with pytest.raises(fo.FuseOpsError, match="are no dimension by name"):
        parallel(foreign)
    spread_experts = parallelize_module(moe, both["tp"], distributed.ExpertParallel())
    one = DTensor.from_local(x, both["tp"], [Partial()])
    for model, summand in (
        (parallel, DTensor.from_local(x, both, [Partial(), Replicate()])),
        (spread_experts, one),
    ):
        with pytest.raises(
            fo.FuseOpsError, match=r"laid out as .* over DeviceMesh.* a part of a sum"
        ):
            model(summand)
    torch.testing.assert_close(parallel(one), parallel(2 * x))


def law_collectives_beside_products_run_as_one() -> None:
    """The rules that overlap them, on stand-ins of torch's CUDA ops: the values of the ops one by one."""
    called = []

    def all_gather_matmul(x: Tensor, w: Tensor, group: Any) -> Any:
        called.append("gather")
        rows = torch_private.all_gather(x.contiguous(), 0, group)
        return rows, rows @ w

    def matmul_reduce_scatter(x: Tensor, w: Tensor, group: Any) -> Tensor:
        called.append("scatter")
        return torch_private.reduce_scatter(x @ w, 0, group)

    model = randomised(mlp(bias=False))
    parallel = parallelized(model, sequence_parallel=True)
    fo.configure(parallel, rules=distributed.overlap_rules, disable=["mlp"])
    x = torch.randn(2 * TOKENS, D).double()
    text = str(parallel.plan(x.chunk(2)[dist.get_rank()]))
    assert "x is on cpu: symmetric memory is CUDA's" in text and not called
    here = tuple(
        replace(
            rule,
            when=tuple(c for c in rule.when if c.__name__ not in ("on_one_host", "sixteen_bits")),
        )
        for rule in distributed.overlap_rules
    )
    fo.configure(parallel, rules=here, disable=["mlp"])
    with (
        patch.object(torch_private, "all_gather_matmul", all_gather_matmul),
        patch.object(torch_private, "matmul_reduce_scatter", matmul_reduce_scatter),
    ):
        compare(model, parallel, x, sequence=-2)
        assert called == ["gather", "scatter", "gather", "scatter"]
        frozen = parallelized(mlp(bias=False), sequence_parallel=True)
        fo.configure(frozen, rules=here, disable=["mlp"])
        frozen.requires_grad_(False)
        mine = x.chunk(2)[dist.get_rank()].clone().requires_grad_()
        frozen(mine).sum().backward()
        assert mine.grad is not None and len(called) == 8


def law_wrong_plans_are_refused() -> None:
    def refused(match: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except fo.FuseOpsError as error:
            assert match in str(error), str(error)
        else:
            raise AssertionError(match)

    columns = distributed.ColwiseParallel
    torn = parallelize_module(mlp(), mesh(), {"1": columns(), "3": distributed.RowwiseParallel()})
    x = torch.randn(TOKENS, D).double()
    refused("ColwiseParallel(gate_up=True)", lambda: torn(x))
    style = columns(gate_up=True)
    odd = fo.ops.Linear(D, 6)
    refused("6, which does not divide by 2 halves over 2 ranks", lambda: style._apply(odd, mesh()))
    refused("torch.distributed.tensor.parallel", lambda: columns()._apply(nn.Linear(2, 2), mesh()))
    twice = parallelized(mlp())
    refused("is a DTensor already", lambda: columns()._apply(twice[1], mesh()))
    last, late = Shard(-1), distributed.RowwiseParallel
    every = (columns(), late(), distributed.SequenceParallel(), distributed.Replicated())
    with fo.quantized_init(fo.recipes.Float8BlockScaling()):
        codes = fo.ops.Linear(D, D)
    for style in every:  # of one Parameter a group no gradient would be added up
        apart = fo.ops.GroupedLinear(2, D, D, packed=False)
        refused("one Parameter a group", partial(style._apply, apart, mesh()))
        refused("has no values to spread", partial(style._apply, codes, mesh()))
    for style in (columns(input_layouts=last), late(output_layouts=last)):
        op = fo.ops.Linear(D, D).double()
        refused("another axis than the last", partial(style._apply, op, mesh()))
        columns()._apply(op, mesh())  # what refused it has left it as it was
        refused("is a DTensor already", partial(late()._apply, op, mesh()))
        assert op(x).shape == (TOKENS, D // 2) and op.in_features == D
    refused("sequence_dim is -1", lambda: distributed.SequenceParallel(sequence_dim=-1))
    refused("tp_plan found no MLP", lambda: distributed.tp_plan(nn.Linear(2, 2)))
    tied = nn.ModuleDict({"emb": nn.Embedding(F, D), "blocks": mlp()})
    tied["head"] = fo.ops.LinearCrossEntropy(D, F)
    tied["head"].weight = tied["emb"].weight
    refused("weight of 'head' is a parameter of 'emb' too", lambda: distributed.tp_plan(tied))
    assert distributed.tp_plan(tied["blocks"])
    spread = parallelized(mlp())
    spread[1].accumulate_into_main_grad = True  # type: ignore[index]
    spread[1].weight.main_grad = torch.zeros_like(spread[1].weight)  # type: ignore[index]
    refused("weight is a DTensor over", lambda: spread(x).sum().backward())
    moe = fo.MoE(D, F, 4, 2)
    refused("router", lambda: distributed.tp_plan(moe, sequence_parallel=True))


def gated() -> list[fo.ops.Op]:
    """Every activation that multiplies two halves, and every one that can read gate and up side by side."""
    kinds = [k for n, k in vars(fo.ops).items() if n.endswith("GLU") and not n.startswith("Scaled")]
    side_by_side = [k for k in kinds if "interleave" in inspect.signature(k).parameters]
    assert fo.ops.SwiGLU in side_by_side
    return [*(kind() for kind in kinds), *(kind(interleave=1) for kind in side_by_side)]


def law_torchs_own_styles_are_right_or_refused() -> None:
    """Torch's styles cut rows as they lie: the first half of the ranks would have gate rows alone."""
    x, refused = torch.randn(TOKENS, D).double(), 0
    for act in gated():
        model = randomised(mlp(act))
        plan = {"1": styles.ColwiseParallel(), "3": styles.RowwiseParallel()}
        parallel = parallelize_module(copy.deepcopy(model), mesh(), plan)
        try:
            y = parallel(x)
        except fo.FuseOpsError as error:
            refused += 1
            assert "1.weight (16, 6) is [gate | up] for '2'" in str(error), error
            assert "ColwiseParallel(gate_up=True)" in str(error), error
        else:
            assert any(act.options[:1]), f"{act} got rows of one half"
            torch.testing.assert_close(y, model(x), msg=str(act))
    assert refused >= 7


# --- checkpoints, and FSDP2 beside it


def trained(model: nn.Module, run: Callable[[nn.Module], Tensor], steps: int = 2) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        run(model).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def same_weights(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, p in expected.named_parameters():
        torch.testing.assert_close(whole(found[name]).reshape(p.shape), p, msg=name)


def law_steps_and_checkpoints() -> None:
    with shared_folder() as folder:
        _steps_and_checkpoints(folder)


def _steps_and_checkpoints(folder: Path) -> None:
    """AdamW with clipping equals one process; what two ranks save, one loads, and the other way round."""
    x = torch.randn(TOKENS, D).double()
    model = randomised(nn.Sequential(mlp(), fo.MoE(D, F, 4, 2).double()))
    parallel = parallelize_module(copy.deepcopy(model), mesh(), distributed.tp_plan(model))
    ours, optimizer = trained(model, lambda m: m(x)), trained(parallel, lambda m: m(x))
    same_weights(parallel, model)

    states = get_state_dict(parallel, optimizer)
    dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=folder / "two")
    alone = distributed.split_halves(nn.Sequential(mlp(), fo.MoE(D, F, 4, 2).double()))
    other = torch.optim.AdamW(alone.parameters(), lr=0.1, foreach=False)
    into = {"model": get_model_state_dict(alone), "optim": get_optimizer_state_dict(alone, other)}
    dcp.load(into, checkpoint_id=folder / "two")
    alone.load_state_dict(into["model"])
    same_weights(alone, model)
    for name, p in model.named_parameters():
        mine = into["optim"]["state"][name]["exp_avg"]
        torch.testing.assert_close(mine.reshape(p.shape), ours.state[p]["exp_avg"], msg=name)

    # a whole model's plain state dict, into two ranks and back, and DCP of the whole into two ranks
    again = parallelize_module(
        nn.Sequential(mlp(), fo.MoE(D, F, 4, 2).double()), mesh(), distributed.tp_plan(model)
    )
    again.load_state_dict(model.state_dict())
    same_weights(again, model)
    full = get_model_state_dict(again, options=StateDictOptions(full_state_dict=True))
    fresh = nn.Sequential(mlp(), fo.MoE(D, F, 4, 2).double())
    fresh.load_state_dict(full)
    same_weights(fresh, model)
    dcp.save(get_model_state_dict(alone), checkpoint_id=folder / "one")
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder / "one")
    set_model_state_dict(again, state)
    same_weights(again, model)


def law_fully_sharded_beside_it() -> None:
    with shared_folder() as folder:
        _fully_sharded_beside_it(folder)


def _fully_sharded_beside_it(folder: Path) -> None:
    """FSDP2 over the other dimension of a mesh, of two ranks and of one."""
    for shape in ((2, 1), (1, 2)):
        both = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = randomised(mlp(bias=False))
        sharded = copy.deepcopy(model)
        sharded = parallelize_module(sharded, both["tp"], distributed.tp_plan(sharded))
        fully_shard(sharded, mesh=both["dp"], shard_placement_fn=distributed.shard_placement)
        data = [torch.randn(TOKENS, D).double() for _ in range(2)]
        mine = data[both["dp"].get_local_rank()]
        used = data[: both["dp"].size()]
        trained(model, lambda m, used=used: torch.cat([m(x) for x in used]) / len(used) ** 0.5)
        trained(sharded, lambda m, mine=mine: m(mine))
        same_weights(sharded, model)
        dcp.save(get_model_state_dict(sharded), checkpoint_id=folder / str(shape))
        alone = distributed.split_halves(mlp(bias=False))
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=folder / str(shape))
        alone.load_state_dict(state)
        same_weights(alone, model)
