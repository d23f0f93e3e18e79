"""Small arguments for every kernel op; a test fails when one has none."""

import torch

E4M3 = torch.float8_e4m3fn


def samples() -> dict[str, tuple]:
    """{op name: arguments}"""
    torch.manual_seed(0)
    x, y, dy = torch.randn(6, 32), torch.randn(6, 16), torch.randn(6, 16)
    probs, offs, w = torch.rand(6), torch.tensor([2, 2, 5], dtype=torch.int32), torch.randn(16)
    rstd, bias = torch.rand(6) + 0.5, torch.randn(3, 16)
    return {
        "act_fwd": (x, "swiglu"),
        "scaled_act_fwd": (x, probs, "swiglu"),
        "act_bwd": (dy, x, "swiglu"),
        "act_bwd_bias": (dy, x, "geglu"),
        "scaled_act_bwd": (dy, x, probs, "swiglu", True, True),
        "bias_fwd": (y, w),
        "bias_bwd": (y,),
        "grouped_bias_fwd": (y, bias, offs, probs),
        "grouped_bias_bwd": (y, offs, probs, bias),
        "grouped_mm": (y, torch.randn(3, 8, 16), offs),
        "grouped_wgrad": (dy, y, offs),
        "rmsnorm_fwd": (y, w, 1e-6),
        "add_rmsnorm_fwd": (y, dy, w, 1e-6),
        "rmsnorm_bwd": (dy, y, w, rstd, dy),
        "quantize_tensor": (y, E4M3, "both"),
        "quantize_rows": (y, E4M3),
        "quantize_blocks": (y, E4M3, 1, "both"),
    }
