"""A pre-norm transformer block, and what fuses in it: python -m fuseops explain examples/prenorm_block.py"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuseops as fo

WIDTH, HEADS, HIDDEN, TOKENS = 64, 4, 128, 32


class Attention(nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(*qkv.shape[:-1], 3, HEADS, -1).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)


def block() -> fo.Sequential:
    ops = fo.ops
    qkv, out = ops.Linear(WIDTH, 3 * WIDTH, bias=False), ops.Linear(WIDTH, WIDTH, bias=False)
    up, down = ops.Linear(WIDTH, 2 * HIDDEN, bias=False), ops.Linear(HIDDEN, WIDTH, bias=False)
    return fo.Sequential(
        fo.Residual({"norm": ops.RMSNorm(WIDTH), "qkv": qkv, "attention": Attention(), "out": out}),
        fo.Residual({"norm": ops.RMSNorm(WIDTH), "up": up, "act": ops.SwiGLU(), "down": down}),
    )


def build() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    return fo.Sequential({"0": block(), "1": block()}), (torch.randn(2, TOKENS, WIDTH),), {}


if __name__ == "__main__":
    model, batch, _ = build()
    print(fo.explain(model, *batch))
