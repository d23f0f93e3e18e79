"""The loss of a head whose vocabulary is sharded over two ranks, beside the loss of whole logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fuseops as fo

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


def law_the_loss_and_every_gradient_are_those_of_whole_logits() -> None:
    for reduction in ("mean", "sum", "none"):
        x, weight, bias, targets = operands()
        options: dict[str, Any] = dict(soft_cap=3.0, temperature=0.7, z_loss=0.1, chunk_bytes=150)
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
            for reduction in ("mean", "none"):
                mine = [x.detach().clone().requires_grad_(), sharded(weight)]
                options: Any = {"reduction": reduction, "label_smoothing": smoothing}
                got = fo.linear_cross_entropy(mine[0], mine[1], targets, weight=given, **options)
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


def law_a_target_that_is_no_class_is_nan() -> None:
    x, weight, _, targets = operands()
    targets[1, 1] = V
    loss = fo.linear_cross_entropy(x, sharded(weight), targets, reduction="none")
    assert loss.isnan().nonzero().tolist() == [[1, 1]]


def law_what_it_cannot_do_is_refused() -> None:
    x, weight, bias, targets = operands()
    copies = nn.Parameter(distribute_tensor(weight.detach(), mesh(), [Replicate()]))
    part = sharded(weight)
    for given, options, message in (
        (copies, {}, r"that is Shard\(0\)"),
        (sharded(weight[:1]), {}, "leaves some of 2 ranks without one"),
        (part, {"gradients": "forward"}, "has no gradients"),
        (part, {"linear_bias": bias}, r"a bias that is Shard\(0\) too"),
    ):
        with pytest.raises(fo.FuseOpsError, match=message):
            fo.linear_cross_entropy(x, given, targets, **options)  # type: ignore[arg-type]
