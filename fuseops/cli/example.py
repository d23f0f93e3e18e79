"""The default model of `fuseops offload-plan`, which docs/offload.md uses.

Twelve dense transformer blocks of fuseops ops (width 4096, 32 heads, FFN 14336) on 8192 tokens in bfloat16.
"""

import torch
from torch import Tensor, nn

from fuseops import ops
from fuseops.layers.sequential import Residual, Sequential

from .target import Target


class ExampleAttention(nn.Module):
    """An `ExampleAttention` is causal attention over one packed buffer of queries, keys and values."""

    def __init__(self, heads: int, sequences: int = 1) -> None:
        super().__init__()
        self.heads, self.sequences = heads, sequences

    def forward(self, qkv: Tensor) -> Tensor:
        tokens, width = qkv.shape
        q, k, v = qkv.view(self.sequences, -1, 3, self.heads, width // 3 // self.heads).permute(
            2, 0, 3, 1, 4
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(tokens, width // 3)


class Stack(nn.Module):
    """A `Stack` is a sequence of dense transformer blocks."""

    def __init__(self, blocks: int, width: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Sequential(
                {
                    "attn": Residual(
                        ops.RMSNorm(width),
                        ops.Linear(width, 3 * width, bias=False),
                        ExampleAttention(heads),
                        ops.Linear(width, width, bias=False),
                    ),
                    "mlp": Residual(
                        ops.RMSNorm(width),
                        ops.Linear(width, 2 * ffn, bias=False),
                        ops.SwiGLU(),
                        ops.Linear(ffn, width, bias=False),
                    ),
                }
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example() -> Target:
    """The stack on torch's meta device, which takes no memory."""
    with torch.device("meta"):
        model = Stack(blocks=12, width=4096, ffn=14336, heads=32).to(torch.bfloat16)
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    return Target("the example of twelve blocks", model, (x,), {})
