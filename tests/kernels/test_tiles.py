"""The tile table of a routing is made once a Sequential call, whatever autograd does with it."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.kernels.registry import watch_launches
from fuseops.ops.op import Call
from fuseops.ops.tiles import tiles_of

pytestmark = pytest.mark.usefixtures("interpreted")

E, D, F, ROWS = 3, 16, 12, 70


def experts() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(
        fo.ops.GroupedLinear(E, D, 2 * F),
        fo.ops.ScaledSwiGLU(),
        fo.ops.GroupedLinear(E, F, D),
    )


def routed(*counts: int) -> fo.Routing:
    return fo.Routing.from_counts(list(counts), torch.linspace(0.1, 1, ROWS))


ROUTING = routed(5, 0, 62)  # three rows of padding


def step(model: fo.Sequential, run: Callable[..., Tensor]) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many tables were made for them."""
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    with watch_launches() as launched:
        y = run(x)
        y.square().sum().backward()
    grads = [t.grad for t in (x, *model.parameters()) if t.grad is not None]
    return [y, *grads], [op.name for op, *_ in launched].count("group_tiles")


def copied(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Saved tensors come back elsewhere, as from the host."""

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t if t.requires_grad else t.clone()):
            return run(x)

    return hooked


WAYS: dict[str, tuple[Any, int]] = {
    "plain": (lambda run: run, 1),
    "checkpoint": (lambda run: lambda x: checkpoint(run, x, use_reentrant=False), 2),
    "reentrant": (lambda run: lambda x: checkpoint(run, x, use_reentrant=True), 2),
    "reloaded": (copied, 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_table_serves_every_gemm(way: str) -> None:
    model = experts()
    wrap, tables = WAYS[way]
    with fo.reference():
        expected, none = step(model, lambda x: model(x, ROUTING))
    assert none == 0
    got, made = step(model, wrap(lambda x: model(x, ROUTING)))
    assert made == tables
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_second_backward_makes_no_second_table() -> None:
    model, x = experts(), torch.randn(ROWS, D, requires_grad=True)
    y = model(x, ROUTING).square().sum()
    with watch_launches() as launched:
        first = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(first[0], torch.autograd.grad(y, x)[0])
    assert launched and "group_tiles" not in {op.name for op, *_ in launched}


def test_offs_written_in_place_get_a_table_of_their_own() -> None:
    """A static buffer, filled anew before each call."""
    model, x = experts(), torch.randn(ROWS, D)
    buffer = fo.Routing(ROUTING.offs.clone(), ROUTING.probs)
    model(x, buffer)
    other = routed(30, 30, 10)
    buffer.offs.copy_(other.offs)
    torch.testing.assert_close(model(x, buffer), model(x, other), rtol=0, atol=0)
    call, offs = Call(scratch={}), ROUTING.offs.clone()
    old = tiles_of(call, offs, ROWS)
    assert tiles_of(call, offs, ROWS) is old and tiles_of(call, offs.detach(), ROWS) is old
    offs.copy_(other.offs)
    new = tiles_of(call, offs, ROWS)
    assert new is not None and torch.equal(new, fo.kernels.group_tiles(other.offs, ROWS))


def test_a_compiled_forward_makes_one_table() -> None:
    model, x = experts(), torch.randn(ROWS, D, requires_grad=True)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    torch.compiler.reset()
    # what inductor does with a graph before it generates code
    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(x, ROUTING).sum().backward()
    tables = [sum("group_tiles" in str(n.target) for n in g.graph.nodes) for g in graphs]
    # torch 2.15 merges equal nodes among those that the backward reads, and among the others: a table of each kind
    parts = "extra_node_key" in inspect.signature(fx_graph_cse).parameters
    assert 1 <= tables[0] <= (2 if parts else 1) and tables[1] <= 1
