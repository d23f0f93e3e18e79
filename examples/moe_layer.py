"""Train a mixture of experts on a task that takes several: each token belongs to a cluster with a map of its own."""

import torch
from torch import Tensor, nn

import fuseops as fo

WIDTH, HIDDEN, EXPERTS, TOP_K, CLUSTERS = 32, 32, 8, 2, 8
TOKENS, STEPS = 512, 100


class Task:
    """Tokens around the centres of clusters, and the map of its cluster applied to each."""

    def __init__(self) -> None:
        self.centres = 2 * torch.randn(CLUSTERS, WIDTH)
        self.maps = torch.randn(CLUSTERS, WIDTH, WIDTH) / WIDTH**0.5

    def batch(self) -> tuple[Tensor, Tensor]:
        chances = 1 / torch.arange(1, CLUSTERS + 1)  # a few clusters hold most tokens
        cluster = torch.multinomial(chances, TOKENS, replacement=True)
        x = self.centres[cluster] + 0.5 * torch.randn(TOKENS, WIDTH)
        return x, torch.bmm(self.maps[cluster], x.unsqueeze(-1)).squeeze(-1)


def layer() -> fo.MoE:
    """DeepSeek-V3's router: sigmoid scores, a bias that evens out the load, a small loss injected as a gradient."""
    return fo.MoE(
        WIDTH,
        HIDDEN,
        EXPERTS,
        TOP_K,
        shared_experts=1,
        score="sigmoid",
        expert_bias=True,
        balance_loss=1e-3,
        aux="inject",
    )


def build() -> tuple[nn.Module, tuple[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    return fo.Residual({"norm": fo.ops.RMSNorm(WIDTH), "moe": layer()}), (Task().batch()[0],), {}


if __name__ == "__main__":
    model, (x,), _ = build()
    print(fo.explain(model, x))
    torch.manual_seed(0)
    task, moe = Task(), layer()
    optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3)
    moe.loss_scale = 1.0  # the share of a micro-batch in the step; here there is one
    for step in range(STEPS + 1):
        x, wanted = task.batch()
        y, offs = moe(x, returns="offs")
        loss = (y - wanted).square().mean() / wanted.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moe["router"].update_expert_bias(rate=1e-2)
        if step % 50 == 0:
            rows = offs.diff(prepend=offs.new_zeros(1)).tolist()
            print(f"step {step}: error {loss.item():.3f}, rows of each expert {rows}")
    if loss.item() > 0.1:
        raise SystemExit("it did not learn")
    print("learnt")
