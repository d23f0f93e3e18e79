"""Compose a layer, train it, and see what fused and what it saves for the backward."""

import torch
from torch import Tensor, nn

import fuseops as fo

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 64, 128, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up, down = fo.ops.Linear(WIDTH, HIDDEN), fo.ops.Linear(HIDDEN, WIDTH, bias=False)
        self.mlp = fo.Residual(fo.ops.RMSNorm(WIDTH), up, fo.ops.GELU(), down)
        fc1 = fo.ops.GroupedLinear(EXPERTS, WIDTH, 2 * HIDDEN, bias=False)
        fc2 = fo.ops.GroupedLinear(EXPERTS, HIDDEN, WIDTH, bias=False)
        self.experts = fo.Sequential({"fc1": fc1, "act": fo.ops.ScaledSwiGLU(), "fc2": fc2})

    def forward(self, x: Tensor, routing: fo.Routing) -> Tensor:
        return self.experts(self.mlp(x), routing)


def build() -> tuple[nn.Module, tuple[Tensor, fo.Routing], dict[str, Tensor]]:
    torch.manual_seed(0)
    routing = fo.Routing.from_counts([8, 0, 20, 4], probs=torch.rand(TOKENS))  # rows of each expert
    return Layer(), (torch.randn(TOKENS, WIDTH), routing), {}


if __name__ == "__main__":
    model, batch, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        loss = (model(*batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    print(fo.explain(model, *batch))
