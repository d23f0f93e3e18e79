"""Small arguments for every kernel op; a test fails when one has none."""

import torch

from fuseops.kernels.launch import arch_of
from fuseops.kernels.registry import KERNEL_OPS

E4M3 = torch.float8_e4m3fn


def fp8_samples(offs):
    """Those of FP8 GEMMs: 5 rows in groups that end at offs, in blocks and columns of 128. Sums of small integers
    are the same whatever multiplies them.
    """
    e = len(offs)
    x, w, dy, cols = (
        torch.randint(-2, 3, shape).float().to(E4M3)
        for shape in ((6, 32), (e, 16, 32), (16, 128 * e), (32, 128 * e))
    )
    dy, cols = columns_of(dy, offs), columns_of(cols, offs)
    columns = dy, torch.full((1, e), 0.5), cols, torch.full((1, e), 2.0), "square", offs
    return {
        "fp8_mm": (x, torch.full((1, 6), 2.0), w, torch.full((e, 1, 1), 0.5), "block", offs),
        "fp8_mm_operand": (
            x,
            torch.full((1, 6), 2.0),
            w,
            torch.full((e, 1, 1), 0.5),
            "block",
            offs,
        ),
        "fp8_wgrad": columns,
        "fp8_wgrad_into": (torch.randn(e, 16, 32), *columns),
    }


def columns_of(codes, offs):
    """Codes (K, 128 E) that are zeros where no group of at most 128 tokens has one, as those of quantized columns."""
    begins = torch.cat((offs.new_zeros(1), offs[:-1]))
    used = torch.arange(128) < (offs - begins)[:, None]
    return codes.view(torch.uint8).masked_fill(~used.flatten(), 0).view(codes.dtype)


def tiles(*shape):
    """Scales in small blocks, swizzled, as one argument."""
    return (torch.randint(120, 130, (*shape, 32, 4, 4), dtype=torch.uint8),)


def samples() -> dict[str, tuple]:
    """{op name: arguments}"""
    torch.manual_seed(0)
    x, y, dy = torch.randn(6, 32), torch.randn(6, 16), torch.randn(6, 16)
    probs, offs, w = torch.rand(6), torch.tensor([2, 2, 5], dtype=torch.int32), torch.randn(16)
    rstd, bias = torch.rand(6) + 0.5, torch.randn(3, 16)
    experts = torch.tensor([[0, 2], [2, 1], [0, 2]])
    index, pos = torch.tensor([0, 2, 1, 0, 1, 2]), torch.tensor([[0, 3], [4, 2], [1, 5]]).int()
    ends, two = (torch.tensor(e, dtype=torch.int32) for e in ([2, 3, 6], [3, 6]))
    k_of_16 = torch.randn(6, 16).argsort(1)[:, :3].to(torch.int32)
    counts = torch.randint(0, 6, (16,), dtype=torch.int32)
    classes = torch.tensor([3, 0, -100, 15, 7, 7])
    halves = torch.randn(6, 128).bfloat16(), torch.randn(6, 256).bfloat16()
    logits = torch.randn(6, 20)
    head = dy, torch.randn(20, 16) / 8, torch.randn(20), classes, torch.rand(20)
    return fp8_samples(offs) | {
        "act_fwd": (x, "swiglu"),
        "scaled_act_fwd": (x, probs, "swiglu"),
        "act_bwd": (dy, x, "swiglu"),
        "act_bwd_bias": (dy, x, "geglu"),
        "scaled_act_bwd": (dy, x, probs, "swiglu", True, True),
        "scaled_act_bwd_into": (x, dy, probs, "swiglu", True, True),
        "act_dprobs": (dy, x, "swiglu"),
        "bias_fwd": (y, w),
        "bias_bwd": (y,),
        "grouped_bias_fwd": (y, bias, offs, probs),
        "grouped_bias_bwd": (y, offs, probs, bias),
        "grouped_mm": (y, torch.randn(3, 8, 16), offs),
        "grouped_mm_into": (torch.randn(6, 8), y, torch.randn(3, 8, 16), offs),
        "grouped_swiglu": (y, torch.randn(3, 8, 16), offs, None, None, None, probs),
        "grouped_dswiglu": (x, y, torch.randn(3, 16, 16), offs, None, probs),
        "grouped_dswiglu_into": (x, y, torch.randn(3, 16, 16), offs, None, probs),
        "grouped_wgrad": (dy, y, offs),
        "grouped_wgrad_into": (torch.randn(3, 16, 16), dy, y, offs),
        "group_tiles": (offs, 6),
        "rmsnorm_fwd": (y, w, 1e-6),
        "add_rmsnorm_fwd": (y, dy, w, 1e-6),
        "rmsnorm_bwd": (dy, y, w, rstd, dy),
        "layernorm_fwd": (y, w, dy[0], 1e-6),
        "add_layernorm_fwd": (y, dy, w, dy[0], 1e-6),
        "layernorm_bwd": (dy, y, w, probs, rstd, dy),
        "apply_dropout": (y, torch.tensor([3]), 0.3),
        "quantize_vectors": (y, E4M3),
        "quantize_micro": (y, E4M3, "col", offs),
        "micro_mm": (
            dy.to(E4M3),
            *tiles(3, 1),
            torch.randn(3, 8, 16).to(E4M3),
            *tiles(3, 1, 1),
            offs,
        ),
        "micro_wgrad": (
            columns_of(torch.randn(8, 384).to(E4M3), offs),
            *tiles(1, 3),
            columns_of(torch.randn(5, 384).to(E4M3), offs),
            *tiles(1, 3),
            offs,
        ),
        "scatter_rows": (dy[:3], pos, ends, 6),
        "gather_rows": (dy[:3], index, ends),
        "combine_fwd": (y, pos, ends, probs),
        "values_of_copies": (probs, pos, ends),
        "linear_cross_entropy_fwd": (*head, [0.1, 1e-2, 5.0, 0.5], -100, 300),
        "linear_cross_entropy_bwd": (
            *(*head, [0.0, 0.0, 0.0, 1.0], -100, 300),
            *(rstd, rstd, [rstd, rstd, rstd, rstd], [True, True, True]),
        ),
        "logits_with_rows": (*head, [0.1, 1e-2, 5.0, 0.5], -100),
        "logit_grads_into": (
            *(logits, *head[:2], *head[3:], rstd, rstd, [0.1, 1e-2, 5.0, 0.5], -100, 0, 20, True),
            *(torch.randn(20, 16), torch.randn(20), False),
        ),
        "scaled_to": (y, torch.tensor(0.5), torch.float16),
        "linear_cross_entropy_grads": (*head, [0.0, 0.1, 0.0, 1.0], -100, 300, rstd, [True] * 3),
        "apply_rope": (x.view(3, 2, 32), torch.rand(3, 8), torch.rand(3, 8), True),
        "apply_rope_pair": (
            *(x.view(3, 2, 32), torch.randn(3, 1, 32)),
            *(torch.rand(3, 16), torch.rand(3, 16), False),
        ),
        "token_slots": (experts, 4, 2),
        "route": (experts, 3, probs.view(3, 2)),
        "expert_counts": (experts, 3),
        "router_fwd": (y, 3, "softmax", True, 1.5, w, 4, 2),
        "router_bwd": (torch.rand(6, 3), y, k_of_16, "softmax", True, 1.5),
        "router_loss": (y, counts, 3, "softmax", 0.1, 0.1),
        "router_loss_bwd": (y, y, counts, torch.rand(()), 3, "softmax", 0.1, 0.1),
        "quantize_operand": (y, ends, E4M3),
        "permute_operand": (y.to(E4M3), torch.rand(1, 6), index.int(), ends),
        "group_amax": (y, ends, index),
        "delayed_inverse": (torch.rand(3, 2), torch.rand(3, 2), torch.rand(2), 1, E4M3, 0.5, True),
        "matrix_amax": (torch.randn(3, 16, 16),),
        "quantize_groups": (y, ends, E4M3, True, True),
        "quantize_matrices": (torch.randn(3, 16, 16), E4M3),
        "quantize_weight": (torch.randn(3, 16, 16), E4M3),
        "rmsnorm_operand": (y, dy, w, 1e-6, E4M3),
        "rmsnorm_columns": (y, w, rstd, E4M3),
        "swiglu_operand": (x, probs, two, E4M3, True, True),
        "dswiglu_operand": (*halves, probs, two, E4M3, E4M3),
        "quantize_group_blocks": (y, offs, E4M3),
        "add_mm": (y.bfloat16(), torch.rand(6, 3), torch.randn(3, 16).bfloat16()),
        "wide_mm": (y.bfloat16(), dy.bfloat16()),
    }


def names_here() -> list[str]:
    """Those whose kernel runs where the tests do: on a GPU those of later architectures run their twin."""
    names = sorted(samples())
    if not torch.cuda.is_available():
        return names
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    return [name for name in names if KERNEL_OPS[name].min_arch <= arch]
