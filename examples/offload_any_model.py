"""Train a plain torch transformer, without one fuseops op, under a memory budget.

A dry run of one step tells what every layer saves and when; the plan says what leaves; the scheduler
does it through module hooks. On a GPU the same code moves to pinned memory beside the computation.
"""

import torch
from torch import nn

from fuseops import offload

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 8), nn.Linear(256, 1000)
).to(device)
tokens = torch.randint(0, 1000, (4, 128), device=device)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


free = offload.plan(model, tokens, layers="1.layers.*", loss=loss_of, min_bytes=1 << 18)
budget = int(free.before.peak * 0.8)  # a GPU with four fifths of the memory that the step needs
plan = offload.plan(
    model, tokens, layers="1.layers.*", loss=loss_of, min_bytes=1 << 18, peak=budget
)
print(plan.explain())

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with offload.Scheduler(model, "1.layers.*", plan=plan) as scheduler:
    for _ in range(3):
        loss = loss_of(model(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
scheduler.assert_matched()
print(scheduler.report().summary())
