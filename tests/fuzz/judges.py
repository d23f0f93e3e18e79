"""What the programs of programs.py call: a chain of ops beside plain torch, a layer of experts beside a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from plain_moe import D, built, judged, step
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload

Tensors = dict[str, Tensor]
Plain = Callable[[Tensor, Tensors, Tensors], Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-9  # of an element and of the mean of its tensor: float64, some tens of ops


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)


def gated(act: Callable[[Tensor], Tensor], h: Tensor, interleave: int) -> Tensor:
    """act(gate) * up of [gate | up], or of alternating blocks of columns."""
    blocks = h.unflatten(-1, (-1, 2, interleave or h.shape[-1] // 2))
    gate, up = (half.flatten(-2) for half in blocks.unbind(-2))
    return act(gate) * up


def grouped(h: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
    """Every group of rows by its own matrix; rows behind the last group are zero."""
    y = h.new_zeros(len(h), weight.shape[1])
    starts = [0, *offs.tolist()]
    for e in range(len(offs)):
        rows = slice(starts[e], starts[e + 1])
        y = torch.cat(
            [
                y[: rows.start],
                F.linear(h[rows], weight[e], None if bias is None else bias[e]),
                y[rows.stop :],
            ]
        )
    return y


def checkpointed(model: nn.Module, x: Tensor, side: Tensors) -> Tensor:
    contexts = fo.checkpoint_contexts
    return checkpoint(lambda x: model(x, **side), x, use_reentrant=False, context_fn=contexts)


def scoped(scope: Callable[[], Any]) -> Callable[..., Tensor]:
    def call(model: nn.Module, x: Tensor, side: Tensors) -> Tensor:
        with scope():
            return model(x, **side)

    return call


def after_other_rows(model: nn.Module, x: Tensor, side: Tensors) -> Tensor:
    """The second call of a plan."""
    empty = {n: t[:0] if n != "offs" else t * 0 for n, t in side.items()}
    model(x[:0], **empty)
    return model(x, **side)


CALLS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda model, x, side: model(x, **side),
    "checkpoint": checkpointed,
    "functional_call": lambda model, x, side: functional_call(
        model, {n: p.clone() for n, p in model.named_parameters()}, (x,), side
    ),
    "unfused": scoped(lambda: fo.fusion(False)),
    "reference": scoped(fo.reference),
    "to_host": scoped(lambda: offload.to_host(min_bytes=0)),
    "second call": after_other_rows,
}


def assert_near(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, f"{name} is {tuple(got.shape)}, not {tuple(expected.shape)}"
    scale = expected.abs() + (expected.abs().mean() if expected.numel() else 0)
    wrong = ((got - expected).abs() > TOLERANCE * scale + 1e-12) | got.isnan()
    assert not wrong.any(), f"{name}: {got[wrong][:3].tolist()}, not {expected[wrong][:3].tolist()}"


def same_as_plain(
    model: nn.Module,
    plain: Plain,
    rows: int,
    width: int,
    offs: Iterable[int] = (),
    frozen: Iterable[int] = (),
    x_grad: bool = True,
    call: str = "plain",
) -> None:
    """Raise AssertionError where y or a gradient of a chain is not that of plain torch."""
    model = varied(model.double(), frozen)
    x, sides = drawn(rows, width, offs, torch.float64)
    mine = outcome(CALLS[call], model, x, sides, x_grad)
    theirs = outcome(of_plain(plain), model, x, sides, x_grad)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert_near(name, mine[name], theirs[name])


def near_plain(
    model: nn.Module,
    plain: Plain,
    rows: int,
    width: int,
    dtype: torch.dtype,
    offs: Iterable[int] = (),
    frozen: Iterable[int] = (),
    x_grad: bool = True,
    call: str = "plain",
) -> None:
    """Raise AssertionError where y or a gradient of a chain in a dtype, on a GPU if there is one, is further from plain
    torch in float64 than rounding explains: much further than plain torch in that dtype, of numbers a rounding off too.
    """
    model = varied(model, frozen).to(DEVICE, dtype)
    x, sides = drawn(rows, width, offs, dtype)
    x, sides = x.to(DEVICE), {n: t.to(DEVICE) for n, t in sides.items()}
    eps, judge = torch.finfo(dtype).eps, of_plain(plain)
    mine = outcome(CALLS[call], model, x, sides, x_grad)
    peers = [outcome(judge, model, x, sides, x_grad)]
    for _ in range(3):
        near = copy.deepcopy(model)
        with torch.no_grad():
            for p in near.parameters():
                p.mul_(1 + eps * torch.randn_like(p))
        peers.append(outcome(judge, near, x * (1 + eps * torch.randn_like(x)), sides, x_grad))
    if not all(t.isfinite().all() for found in peers for t in found.values()):
        return  # float16 has no numbers for it
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    sides = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in sides.items()}
    for name, value in outcome(judge, exact, x.cpu().double(), sides, x_grad).items():
        error, *others = (distance(found[name], value) for found in (mine, *peers))
        size = float(value.norm())
        bound = 4 * max(others) + 4 * eps * size
        assert error <= bound, f"{name} is {error:.3g} from {size:.3g}, at most {bound:.3g}"


def varied(model: nn.Module, frozen: Iterable[int]) -> nn.Module:
    """With numbers added to ones and zeros, as many start out: these hide mistakes."""
    for k, p in enumerate(model.parameters()):
        with torch.no_grad():
            p.add_(0.1 * torch.randn_like(p))
        p.requires_grad_(k not in set(frozen))
    return model


def drawn(rows: int, width: int, offs: Iterable[int], dtype: torch.dtype) -> tuple[Tensor, Tensors]:
    """x, and what ops may read beside it."""
    ends = torch.tensor([*offs], dtype=torch.int32)
    return torch.randn(rows, width).to(dtype), {"offs": ends, "probs": torch.rand(rows).to(dtype)}


def of_plain(plain: Plain) -> Callable[..., Tensor]:
    """A call with the parameters of a model."""

    def call(model: nn.Module, x: Tensor, side: Tensors) -> Tensor:
        return plain(x, dict(model.named_parameters()), side)

    return call


def outcome(
    call: Callable[..., Tensor], model: nn.Module, x: Tensor, sides: Tensors, x_grad: bool
) -> Tensors:
    """y and every gradient, by name."""
    leaf = x.clone().requires_grad_(x_grad)
    side = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in sides.items()}
    y = call(model, leaf, {n: side[n] for n in model.reads})
    owners = {"x": leaf, **side, **dict(model.named_parameters())}
    wanted = {n: t for n, t in owners.items() if t.requires_grad}
    grads: tuple[Tensor, ...] = ()
    if y.requires_grad:
        dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).sin().view_as(y).to(y)
        grads = torch.autograd.grad(y, [*wanted.values()], dy, materialize_grads=True)
    named = zip(wanted, grads, strict=False)
    return {"y": y.detach(), **{f"gradient of {name}": grad for name, grad in named}}


def distance(got: Tensor, exact: Tensor) -> float:
    assert got.shape == exact.shape, f"{tuple(got.shape)}, not {tuple(exact.shape)}"
    off = float((got.cpu().double() - exact).norm())
    return off if off == off else float("inf")


def same_as_loop(kind: str, top_k: int, tokens: int, activation: str, **options: Any) -> None:
    """Raise AssertionError where a layer of experts is not the loop over tokens and experts."""
    moe = built(kind, top_k, activation=activation, **options)
    x = torch.randn(tokens, D, dtype=torch.float64)
    torch.testing.assert_close(step(moe, x), judged(moe, x, activation), rtol=1e-9, atol=1e-12)


def same_unfused_and_kept(
    model: Any,
    recipe: Callable[..., Any],
    options: dict[str, Any],
    rows: int,
    width: int,
    offs: Iterable[int],
    events: Iterable[str],
) -> None:
    """Raise AssertionError where a chain under a recipe is not its ops one by one, or where weights that are kept give
    other bits than those that are made each call.
    """
    model = model.to(DEVICE)
    x, sides = drawn(rows, width, offs, torch.float32)
    x = (x * torch.exp2(torch.randint(-4, 5, (rows, 1)))).to(DEVICE)
    side = {name: sides[name].to(DEVICE) for name in model.reads}
    if DEVICE == "cpu":  # kernels add up in other orders, and a code turns a last bit into a step
        fo.testing.assert_fused_matches_unfused(model, x, recipe=recipe(**options), **side)
    other = copy.deepcopy(model)
    for event in ("nothing", *events):
        results = []
        for twin, policy in ((model, "step"), (other, "none")):
            _happens(event, twin)
            twin.zero_grad()
            leaf = x.clone().requires_grad_()
            with fo.recipe(recipe(**options, weights=policy)):
                y = twin(leaf, **side)
                y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in twin.parameters())])
        for mine, theirs in zip(*results, strict=True):
            if mine is not None or theirs is not None:  # weights that steps blow up end in NaN
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def _happens(event: str, model: nn.Module) -> None:
    if event == "step" and [*model.parameters()]:
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    elif event == "write":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
    elif event == "load":
        model.load_state_dict({name: t * 0.75 for name, t in model.state_dict().items()})
