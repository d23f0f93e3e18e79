"""What only a GPU shows: two runs bit for bit, addresses past 2^31 elements, graphs, no host sync,
shifted pointers.
"""

import pytest
import torch
from samples import samples
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops.kernels import activation, bias, casts, norm, permute, quantize, routing
from fuseops.kernels.registry import KERNEL_OPS

pytestmark = pytest.mark.gpu
NAMES = sorted(samples())


def on_gpu(name):
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, samples()[name])


def bits(value):
    return [t.reshape(-1).view(torch.uint8) for t in tree_leaves(value) if t is not None]


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_equal_and_a_graph_replays(name):
    args, op = on_gpu(name), KERNEL_OPS[name]
    first, second = bits(op(*args)), bits(op(*args))
    assert all(map(torch.equal, first, second))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*args)
    graph.replay()
    assert all(map(torch.equal, bits(captured), first))


@pytest.mark.parametrize("name", NAMES)
def test_no_host_sync(name, no_synchronisation):
    args, op = on_gpu(name), KERNEL_OPS[name]
    op(*args)
    with no_synchronisation():
        op(*args)


@pytest.mark.parametrize("name", NAMES)
def test_shifted_pointers(name):
    """Tensors that start one element into their storage are not 16-byte aligned."""
    op, args = KERNEL_OPS[name], on_gpu(name)

    def shift(t):
        buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        buffer[1:] = t.flatten()
        return buffer[1:].view(t.shape)

    for got, want in zip(
        tree_leaves(op(*tree_map_only(torch.Tensor, shift, args))),
        tree_leaves(op(*args)),
        strict=True,
    ):
        if got is None:  # an op that writes in place
            continue
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-5, atol=1e-6)


def test_addresses_past_two_to_the_31():
    rows, n = (1 << 20) + 3, 2056
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, n, device="cuda").bfloat16()
    tail = x[-3:].clone()
    assert torch.equal(activation.act_fwd(x, "silu")[-3:], activation.act_fwd(tail, "silu"))
    y, rstd = norm.rmsnorm_fwd(x, None, 1e-6)
    assert torch.equal(y[-3:], norm.rmsnorm_fwd(tail, None, 1e-6)[0])
    del y
    assert torch.equal(
        norm.rmsnorm_bwd(x, x, None, rstd, None, False)[0][-3:],
        norm.rmsnorm_bwd(tail, tail, None, rstd[-3:], None, False)[0],
    )
    torch.testing.assert_close(bias.bias_bwd(x), tail.float().sum(0), rtol=1e-5, atol=1e-5)
    row, col, *_ = quantize.quantize_blocks(x, torch.float8_e4m3fn, 1, "both")
    assert torch.equal(
        row[-3:].view(torch.uint8),
        quantize.quantize_blocks(tail, torch.float8_e4m3fn, 1)[0].view(torch.uint8),
    )
    assert col.shape == (n, rows) and bool((col[:, :-3].view(torch.uint8) == 0).all())


def test_permuted_rows_past_two_to_the_31():
    tokens, n = (1 << 20) + 3, 2056
    x = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, n, device="cuda").bfloat16()
    tail = x[-3:].clone()
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")[:, None]
    offs, probs = pos[-1] + 1, torch.ones(tokens, device="cuda")
    y = permute.scatter_rows(x, pos, offs, tokens)
    assert torch.equal(y[-3:], tail)
    assert torch.equal(permute.gather_rows(y, pos[:, 0], offs)[-3:], tail)
    assert torch.equal(permute.combine_fwd(x, pos, offs)[-3:], tail)
    dx, dprobs = permute.combine_bwd(y, x, pos, offs, probs)
    assert torch.equal(dx[-3:], tail)
    torch.testing.assert_close(dprobs[-3:], tail.float().square().sum(1), rtol=1e-5, atol=1e-3)
    del y, dx
    row, col = casts.cast_transpose(x, torch.bfloat16)
    assert torch.equal(row[-3:], tail) and torch.equal(col[:, -3:], tail.t())


@pytest.mark.parametrize("tokens", [1, 1000, 2048, 2049, 60000])
def test_route_of_many_copies_is_a_stable_sort(tokens):
    experts = torch.randint(-1, 130, (tokens, 8), device="cuda", dtype=torch.int32)
    weights = torch.rand(tokens, 8, device="cuda")
    want = routing.route.twin(experts, 128, weights)
    for _ in range(3):
        assert all(map(torch.equal, routing.route(experts, 128, weights), want))
