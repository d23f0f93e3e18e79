"""Plan and train a plain torch transformer, without one fuseops op, under a memory budget."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fuseops import offload

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(1000, 256), body, nn.Linear(256, 1000)).to(device)
tokens = torch.randint(0, 1000, (8, 257), device=device)


def loss_of(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.mT, tokens[:, 1:])


h200 = offload.Hardware.h200()
slow = {dtype: rate / 20 for dtype, rate in h200.matmul.items()}  # a small GPU behind the same link
gpu = replace(h200, name="a small GPU", memory=h200.memory / 20, matmul=slow)
planned = partial(
    offload.plan, model, tokens[:, :-1], layers="1.layers.*", loss=loss_of, min_bytes=1 << 18
)
budget = int(0.7 * planned(hardware=gpu).before.peak)  # less than the step needs
plan = planned(hardware=gpu, peak=budget)
print(plan.explain())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with offload.Scheduler(model, "1.layers.*", plan=plan) as scheduler:
    for _ in range(3):
        torch.autograd.backward(loss_of(model(tokens[:, :-1])))
        optimizer.step()
        optimizer.zero_grad()
scheduler.assert_matched()
print(scheduler.report().summary())
