"""The loss of a head whose vocabulary is sharded over two ranks, beside the loss of whole logits."""

from __future__ import annotations

import functools
import itertools
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import distributed as fd
from fuseops import offload

D, V = 6, 11  # of an odd vocabulary the last rank has fewer classes


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 5, D), (V, D), (V,)))
    targets = torch.randint(0, V, (2, 5))
    targets[0, :2] = -100
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def sharded(t: Tensor) -> Any:
    return nn.Parameter(distribute_tensor(t.detach(), mesh(), [Shard(0)]))


def whole(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits = 3.0 * torch.tanh(F.linear(x, weight, bias) / 3.0) / 0.7
    loss = F.cross_entropy(logits.view(-1, V), targets.view(-1), **options)
    z = (logits.logsumexp(-1).square() * (targets != -100)).view(-1)
    reduction = options["reduction"]
    if reduction == "none":
        return (loss + 0.1 * z).view(targets.shape)
    counts = (targets != -100).sum() if reduction == "mean" else 1
    return loss + 0.1 * z.sum() / counts


WAYS = [("mean", "forward"), ("sum", "forward")]  # of reduction, and of making gradients
WAYS += [(reduction, "backward") for reduction in ("mean", "sum", "none")]


def law_the_loss_and_every_gradient_are_those_of_whole_logits() -> None:
    for (reduction, way), chunk_bytes in itertools.product(WAYS, (1, 150, 1 << 20)):
        x, weight, bias, targets = operands()
        options: dict[str, Any] = dict(soft_cap=3.0, temperature=0.7, z_loss=0.1)
        options |= {"chunk_bytes": chunk_bytes, "gradients": way}
        mine = [x.detach().clone().requires_grad_(), sharded(weight), sharded(bias)]
        got = fo.linear_cross_entropy(
            mine[0], mine[1], targets, linear_bias=mine[2], reduction=reduction, **options
        )
        expected = whole(x, weight, bias, targets, reduction=reduction)
        torch.testing.assert_close(got, expected)
        dy = torch.rand_like(expected)
        for a, b in zip(
            torch.autograd.grad(got, mine, dy),
            torch.autograd.grad(expected, [x, weight, bias], dy),
            strict=True,
        ):
            torch.testing.assert_close(a.full_tensor() if hasattr(a, "full_tensor") else a, b)


def law_class_weights_are_whole_and_labels_smoothed_over_all_classes() -> None:
    x, weight, _, targets = operands()
    classes = torch.rand(V, dtype=x.dtype) + 0.5
    for smoothing in (0.0, 0.3):
        for given in (classes, None):
            for reduction, way in WAYS:
                mine = [x.detach().clone().requires_grad_(), sharded(weight)]
                options: Any = {"reduction": reduction, "label_smoothing": smoothing}
                how: Any = {"weight": given, "gradients": way, "chunk_bytes": 100}
                got = fo.linear_cross_entropy(mine[0], mine[1], targets, **how, **options)
                logits = F.linear(x, weight).view(-1, V)
                expected = F.cross_entropy(logits, targets.view(-1), given, **options)
                torch.testing.assert_close(got, expected.view(got.shape))
                dy = torch.rand_like(got)
                dx, dw = torch.autograd.grad(got, mine, dy)
                wanted = torch.autograd.grad(expected, [x, weight], dy.view(expected.shape))
                torch.testing.assert_close(dx, wanted[0])
                torch.testing.assert_close(dw.full_tensor(), wanted[1])  # type: ignore[attr-defined]


def law_what_is_published_is_of_the_whole_vocabulary() -> None:
    x, weight, _, targets = operands()
    names = ("lse", "log_probs", "entropy")
    mine = [x.detach().clone().requires_grad_(), sharded(weight)]
    _, *got = fo.linear_cross_entropy(mine[0], mine[1], targets, publishes=names)
    _, *expected = fo.linear_cross_entropy(x, weight, targets, publishes=names)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    sums = [sum((k + 1) * t.sin().sum() for k, t in enumerate(ts)) for ts in (got, expected)]
    found, wanted = torch.autograd.grad(sums[0], mine), torch.autograd.grad(sums[1], [x, weight])
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1].full_tensor(), wanted[1])  # type: ignore[attr-defined]


def law_a_head_in_a_sequence_trains() -> None:
    x, weight, _, targets = operands()
    head = fo.ops.LinearCrossEntropy(D, V, dtype=torch.float64, chunk_bytes=100)
    model = fo.Sequential(fo.ops.RMSNorm(D, dtype=torch.float64), head)
    twin = fo.Sequential(
        fo.ops.RMSNorm(D, dtype=torch.float64), fo.ops.LinearCrossEntropy(D, V, dtype=torch.float64)
    )
    twin[1].weight.data.copy_(weight.detach())
    head.weight = sharded(weight)
    got, expected = model(x, targets=targets), twin(x, targets=targets)
    got.backward()
    dx, x.grad = x.grad, None
    expected.backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(head.weight.grad.full_tensor(), twin[1].weight.grad)  # type: ignore[union-attr]
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def law_a_target_that_is_no_class_is_refused_or_nan() -> None:
    """NaN where nobody looks at targets: on a device, and in compiled code."""
    x, weight, _, targets = operands()
    targets[1, 1] = V
    with pytest.raises(fo.FuseOpsError, match="expects targets from 0 to 10, of its 11 classes"):
        fo.linear_cross_entropy(x, sharded(weight), targets)
    with mock.patch("fuseops.ops.cross_entropy.check_targets"):
        for way in WAYS:
            options: Any = dict(zip(("reduction", "gradients"), way, strict=True))
            part = sharded(weight)
            loss = fo.linear_cross_entropy(x, part, targets, **options)
            dx, _ = torch.autograd.grad(loss.sum(), [x, part])
            found = loss.isnan() if loss.dim() else dx.isnan().all(-1)
            assert found.nonzero().tolist() == [[1, 1]] and bool(loss.isnan().any())
            assert dx.isnan().all(-1).nonzero().tolist() == [[1, 1]]


def law_what_it_cannot_do_is_refused() -> None:
    x, weight, bias, targets = operands()
    copies = nn.Parameter(distribute_tensor(weight.detach(), mesh(), [Replicate()]))
    part = sharded(weight)
    for given, options, message in (
        (copies, {}, r"that is Shard\(0\)"),
        (sharded(weight[:1]), {}, "leaves some of 2 ranks without one"),
        (part, {"gradients": "forward", "reduction": "none"}, "needs a loss that is one number"),
        (part, {"linear_bias": bias}, r"a bias that is Shard\(0\) too"),
    ):
        with pytest.raises(fo.FuseOpsError, match=message):
            fo.linear_cross_entropy(x, given, targets, **options)  # type: ignore[arg-type]
    spread = distribute_tensor(targets, mesh(), [Replicate()])
    with pytest.raises(fo.FuseOpsError, match="plain targets beside a plain x"):
        fo.linear_cross_entropy(x, part, spread)


def law_autocast_computes_in_its_dtype() -> None:
    """As a whole head does: products in bfloat16, the parameter and its gradient in float32."""
    torch.manual_seed(5)
    x, weight, targets = torch.randn(4, 5, 16), torch.randn(V, 16), torch.randint(0, V, (4, 5))
    for gradients in (None, "backward"):
        found = []
        for given in (sharded(weight), nn.Parameter(weight.clone())):
            head = fo.ops.LinearCrossEntropy(16, V, gradients=gradients, chunk_bytes=100)
            head.weight = given
            model, leaf = fo.Sequential(fo.ops.RMSNorm(16), head), x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(leaf, targets=targets)
            loss.backward()
            grad: Any = head.weight.grad
            found.append(
                (loss, leaf.grad, grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
            )
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-8)


def law_only_the_gradients_that_are_needed_are_made() -> None:
    x, weight, bias, targets = operands()
    expected = torch.autograd.grad(
        fo.linear_cross_entropy(x, weight, targets, linear_bias=bias), [x, weight, bias]
    )
    for needed in itertools.product((False, True), repeat=3):
        given = [x.detach().clone(), sharded(weight), sharded(bias)]
        for t, need in zip(given, needed, strict=True):
            t.requires_grad_(need)
        loss = fo.linear_cross_entropy(given[0], given[1], targets, linear_bias=given[2])
        assert loss.requires_grad == any(needed)
        if any(needed):
            loss.backward()
        for t, want, need in zip(given, expected, needed, strict=True):
            assert (t.grad is not None) == need
            if need:
                got: Any = t.grad
                torch.testing.assert_close(
                    got.full_tensor() if hasattr(got, "full_tensor") else got, want
                )


def law_no_tokens_and_none_that_count_are_as_of_whole_classes() -> None:
    x, weight, _, targets = operands()
    for rows, ignored in ((0, False), (2, True)):
        for way in ("forward", "backward"):
            some, at = x[0, :rows].detach().requires_grad_(), targets[0, :rows]
            options: Any = {"gradients": way}
            at = torch.full_like(at, -100) if ignored else at
            got, expected = (
                fo.linear_cross_entropy(some, w, at, **options) for w in (sharded(weight), weight)
            )
            torch.testing.assert_close(got, expected, equal_nan=True)
            for a, b in itertools.pairwise(
                torch.autograd.grad(t, some)[0] for t in (got, expected)
            ):
                torch.testing.assert_close(a, b, equal_nan=True)


def transformer(**options: Any) -> fo.Sequential:
    f64: Any = {"dtype": torch.float64}
    up, down = fo.ops.Linear(D, 8, False, **f64), fo.ops.Linear(4, D, False, **f64)
    head = fo.ops.LinearCrossEntropy(D, V, True, **options, **f64)
    mlp = fo.ops.RMSNorm(D, **f64), up, fo.ops.SwiGLU(), down
    return fo.Sequential(*mlp, fo.ops.RMSNorm(D, **f64), head)


def law_a_plan_shards_a_head_by_its_classes() -> None:
    """Whole, or behind tokens that are sharded; by a style of its own too, and in a module of torch."""
    rank, (x, _, _, _) = mesh().get_local_rank(), operands()
    x, targets = x[:, :4], operands()[3][:, :4]
    for sequence, options in itertools.product(
        (False, True), ({}, {"gradients": "backward"}, {"publishes": ("lse",)})
    ):
        torch.manual_seed(7)
        whole, model = transformer(**options), transformer(**options)
        model.load_state_dict(whole.state_dict())
        plan = fd.tp_plan(model, sequence_parallel=sequence)
        assert isinstance(plan["5"], fd.ColwiseParallel)
        parallelize_module(model, mesh(), plan)
        leaf = x.detach().clone().requires_grad_()
        mine = (leaf[:, 2 * rank :][:, :2] if sequence else leaf).detach().requires_grad_()
        losses = []
        for net, given in ((whole, leaf), (model, mine)):
            got = net(given, targets=targets)
            losses.append(got[0] + got[1].sin().sum() if isinstance(got, tuple) else got)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        dx: Any = leaf.grad[:, 2 * rank :][:, :2] if sequence else leaf.grad  # type: ignore[index]
        torch.testing.assert_close(mine.grad, dx)
        for (name, p), (_, q) in zip(
            whole.named_parameters(), model.named_parameters(), strict=True
        ):
            grad: Any = q.grad
            torch.testing.assert_close(grad.full_tensor().view_as(p), p.grad, msg=name)


def law_features_of_one_process_hold_over_parts_of_a_vocabulary() -> None:
    """Names of what is saved, offload, recomputation, plain torch, and compiled code of any number of tokens."""
    x, _, _, targets = operands()
    model = transformer()
    parallelize_module(model, mesh(), fd.tp_plan(model))
    params: list[Any] = [*model.parameters()]

    def grads(run: Any, tokens: int = 2) -> list[Tensor]:
        leaf = x.detach().repeat(2, 1, 1)[:tokens].requires_grad_()
        loss = run(leaf, targets=targets.repeat(2, 1)[:tokens])
        return [loss, *torch.autograd.grad(loss, [leaf, *params])]

    def close(a: list[Any], b: list[Any]) -> None:
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(
                *(t.to_local() if hasattr(t, "to_local") else t for t in (left, right))
            )

    expected = grads(model)
    with offload.to_host(min_bytes=0) as scope:
        got = grads(model)
    close(got, expected)
    moved = {e.name for e in scope.report().entries if e.decision == "moved"}
    assert {"5.dx", "5.dweight", "5.dbias"} <= moved
    close(grads(functools.partial(checkpoint, model, use_reentrant=False)), expected)
    with fo.reference():
        close(grads(model), expected)
    # torch 2.11 takes no sizes of its own kind through such a node: a number of tokens is compiled for
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for tokens in (2, 3):
        close(grads(compiled, tokens), grads(model, tokens))
    head: Any = model[5]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x: Tensor, targets: Tensor) -> Tensor:
        return fo.linear_cross_entropy(x, head.weight, targets, linear_bias=head.bias)

    got = torch.autograd.grad(loss_of(x, targets), [head.weight, head.bias])
    wanted = torch.autograd.grad(
        fo.linear_cross_entropy(x, head.weight, targets, linear_bias=head.bias),
        [head.weight, head.bias],
    )
    close([*got], [*wanted])
