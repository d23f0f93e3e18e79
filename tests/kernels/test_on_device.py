"""What only a GPU shows: two runs bit for bit, addresses past 2^31 elements, graphs, no host sync,
shifted pointers.
"""

import pytest
import torch
from samples import names_here, samples
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops.kernels import activation, amax, bias, norm, permute, quantize, routing
from fuseops.kernels.registry import KERNEL_OPS

pytestmark = pytest.mark.gpu
NAMES = names_here()


def on_gpu(name):
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, samples()[name])


def bits(value):
    return [t.reshape(-1).view(torch.uint8) for t in tree_leaves(value) if t is not None]


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_equal_and_a_graph_replays(name):
    args, op = on_gpu(name), KERNEL_OPS[name]
    first, second = bits(op(*on_gpu(name))), bits(op(*args))
    assert all(map(torch.equal, first, second))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*args)
    for t, given in zip(tree_leaves(args), tree_leaves(on_gpu(name)), strict=True):
        if isinstance(t, torch.Tensor):  # some write over what they read
            t.copy_(given)
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


ROWS, COLUMNS = (1 << 20) + 3, 2056
F8 = torch.float8_e4m3fn


def last_rows(t):
    return t[-3:]


def whole(t):
    return t


def ones(x):
    return torch.ones(len(x), device=x.device)


def ends(x):
    """One group of all rows."""
    return torch.tensor([len(x)], dtype=torch.int32, device=x.device)


FAR = {
    "act_fwd": (lambda x: activation.act_fwd(x, "swiglu"), last_rows),
    "act_bwd": (lambda x: activation.act_bwd(x, x, "silu"), last_rows),
    "act_bwd_bias": (lambda x: activation.act_bwd_bias(x, x, "silu"), last_rows, whole),
    "scaled_act_bwd": (
        lambda x: activation.scaled_act_bwd(x, x, ones(x), "silu")[:2],
        last_rows,
        last_rows,
    ),
    "rmsnorm_fwd": (lambda x: norm.rmsnorm_fwd(x, None, 1e-6), last_rows, last_rows),
    "add_rmsnorm_fwd": (lambda x: norm.add_rmsnorm_fwd(x, x, None, 1e-6)[:2], last_rows, last_rows),
    "rmsnorm_bwd": (lambda x: norm.rmsnorm_bwd(x, x, None, ones(x)), last_rows, whole),
    "bias_bwd": (bias.bias_bwd, whole),
    "grouped_bias_bwd": (lambda x: bias.grouped_bias_bwd(x, ends(x))[0], whole),
    "quantize_vectors": (lambda x: quantize.quantize_vectors(x, F8)[0], last_rows),
    "quantize_groups": (lambda x: amax.quantize_groups(x, None, F8)[0], last_rows),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAR))
def test_addresses_past_two_to_the_31(name):
    """All rows but the last three are zeros: these give what they give alone."""
    call, *parts = FAR[name]
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, COLUMNS, device="cuda").bfloat16()
    tail = x[-3:].clone()
    far, near = (y if isinstance(y, tuple) else (y,) for y in (call(x), call(tail)))
    for got, want, part in zip(far, near, parts, strict=True):
        torch.testing.assert_close(part(got).float(), part(want).float(), rtol=1e-6, atol=1e-6)


def test_columnwise_blocks_past_two_to_the_31():
    """Blocks of 128 rows are counted from the first row, so the last three share theirs with zeros."""
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, COLUMNS, device="cuda").bfloat16()
    block = x[ROWS // 128 * 128 :].clone()
    got, col = (quantize.quantize_group_blocks(t, ends(t), F8)[0][:, : len(t)] for t in (x, block))
    assert torch.equal(got[:, -len(block) :].float(), col.float())
    assert not got[:, : -len(block)].view(torch.uint8).any()


def test_permuted_rows_past_two_to_the_31():
    tokens, n = (1 << 20) + 3, 2056
    x = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, n, device="cuda").bfloat16()
    tail = x[-3:].clone()
    pos = torch.arange(tokens, dtype=torch.int32, device="cuda")[:, None]
    offs = pos[-1] + 1
    y = permute.scatter_rows(x, pos, offs, tokens)
    assert torch.equal(y[-3:], tail)
    assert torch.equal(permute.gather_rows(y, pos[:, 0], offs)[-3:], tail)
    assert torch.equal(permute.combine_fwd(x, pos, offs)[-3:], tail)


@pytest.mark.parametrize("tokens", [1, 1000, 2048, 2049, 60000])
def test_route_of_many_copies_is_a_stable_sort(tokens):
    experts = torch.randint(-1, 130, (tokens, 8), device="cuda", dtype=torch.int32)
    weights = torch.rand(tokens, 8, device="cuda")
    want = routing.route.twin(experts, 128, weights)
    for _ in range(3):
        assert all(map(torch.equal, routing.route(experts, 128, weights), want))
