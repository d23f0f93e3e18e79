"""What the offload planner predicts of the models in docs/scale.md, by dry runs on fake tensors for the shipped H200.

    python benchmarks/scale_planned.py        # write benchmarks/scale_planned.json, in about a minute
    python benchmarks/scale_planned.py memory # print what models that prefer memory would take, and write nothing

Some blocks of each model on meta, with their experts over a mesh of ranks that need not exist: seconds of a block, what
it saves, what of that are tokens that could be dispatched again in the backward instead, and what leaves without a
stall, with tokens that travel in no time and over each link. Blocks are
alike, so a model has as many times as much.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import measure
from scale import LINKS, MODELS, PLANNED, RANKS, TOKENS, Sizes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel
from fuseops.offload.planning.plan import plan_profile
from fuseops.offload.planning.profile import Profile

BLOCKS = 6


class Attention(nn.Module):
    def __init__(self, m: Sizes) -> None:
        super().__init__()
        self.m, linear = m, lambda i, o: fo.ops.Linear(i, o, bias=False)
        self.q = linear(m.dim, m.heads * m.head_dim)
        self.kv = linear(m.dim, 2 * m.kv_heads * m.head_dim)
        self.out = linear(m.heads * m.head_dim, m.dim)

    def forward(self, x: Tensor) -> Tensor:
        m = self.m
        q = self.q(x).view(1, len(x), m.heads, m.head_dim).transpose(1, 2)
        k, v = self.kv(x).view(1, len(x), 2, m.kv_heads, m.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(len(x), -1))


def planned(m: Sizes, ranks: int, prefer: str) -> dict[str, Any]:
    """Of one block, with experts over so many ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                str(k): fo.Sequential(
                    {
                        "attention": fo.Residual(fo.ops.RMSNorm(m.dim), Attention(m)),
                        "mlp": fo.Residual(
                            fo.ops.RMSNorm(m.dim), fo.MoE(m.dim, m.ffn, m.experts, m.top_k)
                        ),
                    }
                )
                for k in range(BLOCKS)
            }
        ).to(torch.bfloat16)
        x = torch.zeros(TOKENS, m.dim, dtype=torch.bfloat16, requires_grad=True)
    parallelize_module(model, mesh, ExpertParallel(dispatcher="host_counts", tokens=TOKENS))
    whole = nn.Sequential(*model.values())
    fo.configure(whole, prefer=prefer)
    hardware = replace(offload.Hardware.h200(), network=1.0)
    profile = offload.plan(whole, x, layers="*", hardware=hardware).profile
    saved = sum(s.nbytes for s in profile.saved)
    arrived = [g.dropped_bytes(profile.saved) for g in profile.recompute if g.kind == "dispatch"]
    row: dict[str, Any] = {
        "saved_mb": saved / BLOCKS / 1e6,
        "dispatched_again_mb": sum(sum(g.values()) for g in arrived) / BLOCKS / 1e6,
    }
    for where, rate in {"alone": float("inf"), **LINKS}.items():
        plan = plan_profile(over(profile, rate / 1e9), hardware)
        row[where] = {
            "ms": plan.before.seconds * 1e3 / BLOCKS,
            # the last is read again at once
            "leaves_mb": plan.bytes_of("offload") / (BLOCKS - 1) / 1e6,
            "network_ms": plan.profile.network * 1e3 / BLOCKS,
            "stall_ms": plan.after.stall * 1e3 / BLOCKS,
        }
    return row


def over(profile: Profile, rate: float) -> Profile:
    """The profile, made for a network of 1 GB/s, over one of another rate."""
    ops = (o._replace(seconds=o.seconds / rate) if o.lane == "network" else o for o in profile.ops)
    return replace(profile, ops=tuple(ops))


def main() -> None:
    prefer = sys.argv[1] if sys.argv[1:] else "speed"
    found: dict[str, Any] = {"environment": measure.environment(), "blocks": BLOCKS, "planned": {}}
    for name, m in MODELS.items():
        for ranks in RANKS:
            store = FakeStore()
            dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
            found["planned"][f"{name}, experts over {ranks}"] = row = planned(m, ranks, prefer)
            dist.destroy_process_group()
            print(name, ranks, row, flush=True)
    if prefer == "speed":
        PLANNED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
