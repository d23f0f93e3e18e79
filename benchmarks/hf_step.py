"""A training step of stock Hugging Face models, as they are, compiled, and after `hf.apply`, in bf16.

    python benchmarks/hf_step.py --out benchmarks/results/hf_step_h200.json

The step is forward, loss and backward of a causal language model with labels, without an optimizer: four layers of the
sizes of Qwen3-30B-A3B with a vocabulary of 32768, and four of Llama-3.1-8B with its own, over 16384 tokens in sequences
of 4096. All candidates share one set of parameters; stock runs with its own default, grouped GEMMs and SDPA. Candidates
run in turn, in balanced order, back to back for `--span` seconds to warm up and as long again in each round; ratios are
those of each round. `fuseops_fp8` runs under `Float8BlockScaling(weights="none")`: weights are quantized where they are
read, rows in the forward and columns in the backward. `fuseops_fp8_kept` is a later micro-batch under "step", whose
weights are quantized already, and no part of its peak. Peak is what was allocated
at once, less what the other candidates hold. First, small models of several families are compared with float32
(`checks`: the error of logits and gradients, stock's beside ours), and the layers that were replaced run where a wait
for the device is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import layers, measure, runs
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import fuseops as fo
from fuseops.integrations import hf

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(
        vocab_size=32768, hidden_size=2048, intermediate_size=6144, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
    "llama": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    ),
}  # fmt: skip
CANDIDATES = (
    "stock", "stock_compiled", "liger", "sonicmoe", "fuseops", "fuseops_compiled", "fuseops_fp8", "fuseops_fp8_kept",
)  # fmt: skip
SMALL: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2,
)  # fmt: skip
EXPERTS = dict(num_experts=16, num_local_experts=16, n_routed_experts=16, moe_intermediate_size=128)
MLA = dict(q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64)
LOOKED_AT = ("mlp", "experts", "gate", "router", "input_layernorm")
CHECKED: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | dict(head_dim=64, norm_topk_prob=True),
    "gpt_oss": dict(num_local_experts=16, head_dim=64),
    "deepseek_v3": EXPERTS | MLA | dict(n_group=4, topk_group=2, first_k_dense_replace=1),
    "gemma2": dict(head_dim=64, query_pre_attn_scalar=64),
    "llama": {},
}


def built(kind: str, sizes: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    known = CONFIG_MAPPING[kind]()
    config = CONFIG_MAPPING[kind](**{k: v for k, v in sizes.items() if hasattr(known, k)})
    config.use_cache = False
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def beside(model: nn.Module) -> nn.Module:
    """A copy with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


# --- right


def check(kind: str) -> dict[str, Any]:
    """The errors of stock and of ours in bf16, over float32, as norms."""
    right = built(kind, SMALL | CHECKED[kind], torch.float32)
    for name, p in right.named_parameters():  # what starts at zero chooses and scales nothing
        if p.dim() == 1 or "gate.weight" in name or "router" in name:
            nn.init.normal_(p, float("norm" in name), 0.2)
    tokens = torch.randint(SMALL["vocab_size"], (2, 256), device="cuda")
    expected = _results(right, tokens)
    model = copy.deepcopy(right).bfloat16()
    found = {"stock": _errors(_results(model, tokens), expected)}
    report = hf.apply(model)
    found["fuseops"] = _errors(_results(model, tokens), expected)
    waits = _waits(model)
    return {**found, "replaced": len(report.replaced), "left": len(report.left), "waits": waits}


def _results(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    found = {k: p.grad.float() for k, p in model.named_parameters() if p.grad is not None}
    logits = out.logits
    if logits is None:
        with torch.no_grad():
            logits = model(tokens).logits
    return found | {"logits": logits.detach().float(), "loss": out.loss.detach().float()}


def _errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the logits and the loss, and the worst and the median of all gradients."""
    errors = {k: float((found[k] - t).norm() / t.norm()) for k, t in expected.items()}
    own = {k: errors.pop(k) for k in ("logits", "loss")}
    worst = max(errors, key=lambda k: errors[k])
    middle = sorted(errors.values())[len(errors) // 2]
    return {**own, "median": middle, "worst": errors[worst], "worst_at": worst}


def _waits(model: nn.Module) -> list[str]:
    """The replaced modules whose forward or backward waits for the device."""
    found = []
    for path, module in model.named_modules():
        own = module.__dict__.get("forward")
        if own is None or path.rsplit(".", 1)[-1] not in LOOKED_AT:
            continue
        x = torch.randn(64, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        args: tuple[Any, ...] = (x,)
        if path.endswith("experts"):
            chosen = torch.randint(module.num_experts, (64, 2), device="cuda")
            args = (x, chosen, torch.rand(64, 2, device="cuda"))
        _first(module(*args)).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            _first(module(*args)).sum().backward()
        except Exception as error:
            found.append(f"{path}: {error}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _first(found: Any) -> torch.Tensor:
    """The tensor, or of a router's three the weights."""
    return found[1] if isinstance(found, tuple) else found


# --- fast


def liger(model: nn.Module) -> dict[str, Any]:
    """Patch one model.   -> what the patch put into the module of its class, where stock would find it too"""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    home = vars(sys.modules[type(model).__module__])
    before = dict(home)
    _apply_liger_kernel_to_instance(model=model)
    put = {name: value for name, value in home.items() if before.get(name) is not value}
    home.update({name: before[name] for name in put})
    return put


@contextlib.contextmanager
def holding(model: nn.Module, put: dict[str, Any]) -> Iterator[None]:
    """Inside, the module of the model's class has these names."""
    home = vars(sys.modules[type(model).__module__])
    before = {name: home[name] for name in put}
    home.update(put)
    try:
        yield
    finally:
        home.update(before)


def candidate(name: str, stock: nn.Module, tokens: torch.Tensor) -> tuple[Any, Any]:
    """A step over the parameters of `stock`, and the report of `hf.apply`."""
    model, report, put = beside(stock).train(), None, {}
    if name == "liger":
        put = liger(model)
    if name == "sonicmoe":
        model.set_experts_implementation("sonicmoe")
    if name.startswith("fuseops"):
        report = hf.apply(model)
    if "fp8" in name:
        policy = "step" if name.endswith("kept") else "none"
        fo.configure(model, recipe=fo.recipes.Float8BlockScaling(weights=policy))
    runs = torch.compile(model, dynamic=False) if name.endswith("compiled") else model

    def step() -> None:
        with holding(model, put):
            runs(tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return step, report


def peak(step: Any) -> float:
    """GiB at once in a step, beyond what is resident before it."""
    gc.collect()
    return layers.active_bytes(step) / 2**30


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    stock = built(kind, SIZES[kind], torch.bfloat16)
    size = options.batch, options.length
    tokens = torch.randint(SIZES[kind]["vocab_size"], size, device="cuda")
    calls, report = {}, None
    record: dict[str, Any] = {"warm_s": {}, "absent": {}, "peak_gib": {}}
    for name in options.candidates:
        begun = time.perf_counter()
        try:
            call, replaced = candidate(name, stock, tokens)
            call()
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot run is reported, not hidden
            record["absent"][name] = f"{type(error).__name__}: {error}"[:300]
            continue
        calls[name], report = call, report or replaced
        record["warm_s"][name] = round(time.perf_counter() - begun, 1)
        print(kind, name, "warm", record["warm_s"][name], flush=True)
    if options.warm:
        return record
    record["peak_gib"] = {name: round(peak(call), 2) for name, call in calls.items()}
    rounds = measure.in_turn(calls, options.rounds, options.span)
    record["us"] = measure.medians(rounds)
    for ours in ("fuseops", "fuseops_compiled", "fuseops_fp8", "fuseops_fp8_kept"):
        if ours in rounds:
            peers = {name: us for name, us in rounds.items() if name != ours}
            record[f"over_{ours}"] = {
                n: measure.paired(rounds[ours], us) for n, us in peers.items()
            }
    record["report"] = str(report).splitlines()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    runs.add_run_options(parser)
    parser.add_argument("--warm", action="store_true", help="compile, time nothing")
    parser.add_argument("--checks", nargs="*", default=list(CHECKED), choices=list(CHECKED))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    run = runs.Run(options, "transformers", "liger-kernel")
    run.report["tokens"] = options.batch * options.length
    run.each(check, options.checks, part="checks")
    run.each(partial(measured, options=options), options.models, part="steps")


if __name__ == "__main__":
    main()
