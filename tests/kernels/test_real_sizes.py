"""On a GPU, at sizes of more than one chunk, wave and group: kernels equal float64 references, repeat
bit for bit, and calls in a row, whose launches overlap, do not disturb each other.
"""

import pytest
import torch
from laws import assert_matches, splits, tensor
from test_quantize import same_bits
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops import kernels
from fuseops.kernels.registry import KERNEL_OPS

pytestmark = pytest.mark.gpu
E4M3, N, EXPERTS, K = torch.float8_e4m3fn, 1040, 7, 3


def arguments(rows, seed):
    """{case: (op name, arguments)}"""
    draw = lambda i, n=N: tensor((rows, n), torch.bfloat16, "normal", seed + i)  # noqa: E731
    x, dy, wide = draw(0), draw(1), draw(2, 2 * N)
    probs, rstd = (tensor((rows,), torch.float32, "normal", seed + i).abs() for i in (3, 4))
    bias, weight = tensor((EXPERTS, N), torch.bfloat16, "normal", seed + 5), draw(6)[0]
    offs = splits(rows, EXPERTS, seed, 5)
    logits = tensor((rows, 128), torch.float32, "normal", seed + 7)
    experts = logits.topk(K).indices.to(torch.int32)
    ends, index, pos, routed = kernels.route.twin(experts, 128, torch.rand(rows, K))
    return {
        "bias_bwd": ("bias_bwd", x),
        "grouped_bias_bwd": ("grouped_bias_bwd", x, offs, probs),
        "grouped_bias_bwd_dprobs": ("grouped_bias_bwd", x, offs, probs, bias),
        "act_bwd_bias": ("act_bwd_bias", dy, wide, "swiglu"),
        "scaled_act_bwd": ("scaled_act_bwd", dy, wide, probs, "swiglu", True, True),
        "rmsnorm_bwd": ("rmsnorm_bwd", dy, x, weight, rstd, dy),
        "quantize_vectors": ("quantize_vectors", x, E4M3),
        "quantize_groups": ("quantize_groups", x, None, E4M3, True, True),
        "quantize_group_blocks": ("quantize_group_blocks", x, offs, E4M3),
        "router_fwd": ("router_fwd", logits, K, "softmax", True),
        "route": ("route", experts, 128, torch.rand(rows, K)),
        "gather_rows": ("gather_rows", x, index, ends),
        "combine_fwd": ("combine_fwd", x.repeat(K, 1), pos, ends, routed),
    }


CASES = sorted(arguments(8, 0))


@pytest.mark.parametrize("rows", [4096, 4099])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, rows):
    name, *args = arguments(rows, 0)[case]
    if "quantize" in name:
        same_bits(KERNEL_OPS[name], *args)
    else:
        assert_matches(KERNEL_OPS[name], *args, sums=True)


@pytest.mark.parametrize("case", CASES)
def test_calls_in_a_row(case):
    """Each call alone gives what it gives among others."""
    calls = [arguments(4096, seed)[case] for seed in range(3)]
    op = KERNEL_OPS[calls[0][0]]
    calls = [tree_map_only(torch.Tensor, torch.Tensor.cuda, args) for _, *args in calls]
    alone = []
    for args in calls:
        alone.append(op(*args))
        torch.cuda.synchronize()
    for _ in range(10):
        together = [op(*args) for args in calls]
        for got, want in zip(tree_leaves(together), tree_leaves(alone), strict=True):
            assert torch.equal(
                got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
            )


@pytest.mark.parametrize("rows", [63, 4096])
def test_a_launch_sees_what_those_before_it_wrote(rows):
    """Every kernel of a chain reads the last one's result, in memory that others have just left."""
    x, wide, weight, probs = (
        t.cuda()
        for t in (
            *(tensor((rows, n), torch.bfloat16, "normal", n) for n in (N, 2 * N)),
            tensor((N,), torch.bfloat16, "normal", 3),
            tensor((rows,), torch.float32, "normal", 4),
        )
    )

    def chain(then):
        def step(name, *args):
            result = KERNEL_OPS[name](*args)
            then()
            return result

        h = x
        for _ in range(5):
            h = step("bias_fwd", h, weight)
            y, rstd = step("rmsnorm_fwd", h, weight, 1e-6)
            dx = step("act_bwd", y, wide, "swiglu")
            dx, dprobs, _ = step("scaled_act_bwd", y, dx, probs, "swiglu")
            y = step("scaled_act_fwd", dx, dprobs, "swiglu")
            dy, dbias = step("act_bwd_bias", y, h, "silu")
            dh, dw = step("rmsnorm_bwd", dy, h, weight, rstd, y)
            db = step("bias_bwd", dh)
            h = step("act_fwd", dh, "gelu_tanh")
        return h, dbias, dw, db

    want = chain(torch.cuda.synchronize)
    assert all(t.isfinite().all() for t in want)
    for _ in range(10):
        for got, alone in zip(chain(lambda: None), want, strict=True):
            assert torch.equal(got.view(torch.uint8), alone.view(torch.uint8))


def test_offsets_into_a_large_matrix_have_64_bits():
    """A matrix of more than 2^31 elements: its last rows are quantized as if they were alone."""
    w = torch.empty(139264, 16384, device="cuda", dtype=torch.bfloat16).normal_()
    row, row_scale, col, col_scale = kernels.quantize_weight(w, E4M3)
    alone = kernels.quantize_weight(w[-128:], E4M3)
    last = row[-128:], row_scale[-1:], col[:, -128:], col_scale[:, -1:]
    for got, want in zip(last, alone, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))
