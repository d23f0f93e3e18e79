"""What only a GPU shows: two runs bit for bit, addresses past 2^31 elements, graphs, no host sync,
shifted pointers.
"""

import pytest
import torch
from samples import samples
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops.kernels import activation, bias, norm, quantize
from fuseops.kernels.registry import KERNEL_OPS

pytestmark = pytest.mark.gpu
NAMES = sorted(samples())


def on_gpu(name):
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, samples()[name])


def bits(value):
    return [t.contiguous().view(torch.uint8) for t in tree_leaves(value)]


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
def test_no_host_sync(name):
    args, op = on_gpu(name), KERNEL_OPS[name]
    op(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
