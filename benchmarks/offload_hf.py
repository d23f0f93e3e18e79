"""Planned and measured peaks of a Hugging Face Qwen3-MoE (8 layers, 64 experts) of 16k tokens, budget by budget.

    python benchmarks/offload_hf.py --out benchmarks/results/offload_hf_h200.json

One step is recorded and planned without a budget and for three; each plan is then followed for a few steps. Peaks are
active bytes, parameters and gradients included. `ratio` is the measured peak over the planned one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from common import measure

from fuseops import offload
from fuseops.integrations import hf

GIB = 1 << 30
LAYERS = "model.layers.*"


def model_of(layers: int, tokens: int) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.Qwen3MoeForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    hf.apply(model)
    return model.train()


class Steps:
    def __init__(self, tokens: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = model_of(layers, tokens)
        self.ids = torch.randint(3, 32000, (tokens // 4096, 4096), device="cuda")

    def step(self) -> None:
        self.model(self.ids, labels=self.ids).loss.backward()

    def forget(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def peak(self, steps: int) -> int:
        """The largest peak of some steps, the first left out."""
        found = 0
        for number in range(steps + 1):
            self.forget()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            if number:
                found = max(found, torch.cuda.memory_stats()["active_bytes.all.peak"])
        self.forget()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--less", type=float, nargs="*", default=(2.4, 4.8, 7.5), help="GiB")
    options = parser.parse_args()
    steps = Steps(options.tokens, options.layers)
    steps.peak(1)
    report: dict[str, Any] = {"environment": measure.environment("transformers"), "peaks": {}}
    machine = offload.Hardware.measure()
    call = {"layers": LAYERS, "labels": steps.ids, "record": True, "hardware": machine}
    free = offload.plan(steps.model, steps.ids, **call)
    steps.forget()
    plain = free.before.peak
    plans = {"nothing moved": None}
    for less in options.less:
        budget = f"{(plain - less * GIB) / GIB:.2f}GiB"
        plans[budget] = offload.plan(steps.model, steps.ids, peak=budget, **call)
        steps.forget()
    for name, plan in plans.items():
        if plan is None:
            planned, measured = plain, steps.peak(3)
        else:
            planned = plan.after.peak
            with offload.Scheduler(steps.model, layers=LAYERS, plan=plan):
                measured = steps.peak(3)
        report["peaks"][name] = {
            "planned_gib": round(planned / GIB, 3),
            "measured_gib": round(measured / GIB, 3),
            "ratio": round(measured / planned, 4),
        }
        print(name, report["peaks"][name], flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
