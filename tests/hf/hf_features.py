"""What each family is trained and used under after `hf.apply`. One function a feature; it fails where ours differs."""

from __future__ import annotations

import copy
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from families import FAMILIES, MOE, agree, differences, step, stock, tokens
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import fuseops as fo
from fuseops.integrations import hf


class Feature(NamedTuple):
    """A row of the table.   families: for which it is tried"""

    name: str
    run: Callable[[str], None]
    families: tuple[str, ...]


def applied(name: str) -> nn.Module:
    model = stock(name)
    hf.apply(model)
    return model


def outputs_and_gradients(name: str) -> None:
    """In training mode, too: attention, loss and the order of parameters are stock's."""
    x = tokens()
    for training in (False, True):
        agree(step(applied(name).train(training), x), step(stock(name).train(training), x))


def without_logits(name: str) -> None:
    """In training logits are made when asked for; labels that are shifted already are taken as they are."""
    model, expected, x = applied(name).train(), stock(name).train(), tokens()
    shifted: dict[str, Any] = {"shift_labels": torch.cat([x[:, 1:], torch.full((2, 1), -100)], 1)}
    for keywords in ({}, shifted, {"num_items_in_batch": 5}):
        assert model(x, labels=x, **keywords).logits is None
        agree(step(model, x, **keywords), step(expected, x, **keywords))
    found = model(x, labels=x, skip_logits=False)
    agree({"logits": found.logits}, {"logits": expected(x).logits})
    assert model(x, logits_to_keep=2).logits.shape[1] == 2
    assert model.eval()(x, labels=x).logits is not None
    assert model(x, labels=x, skip_logits=True).logits is None


def padded(name: str) -> None:
    """A batch with padding, and labels that leave tokens out."""
    x, mask = tokens(), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    keywords: dict[str, Any] = {"attention_mask": mask, "num_items_in_batch": torch.tensor(7)}
    agree(step(applied(name), x, **keywords), step(stock(name), x, **keywords))


def auxiliary_loss(name: str) -> None:
    """The balancing loss over the routers' logits, and its gradient."""
    x, expected = tokens(), stock(name)
    found = step(applied(name), x, output_router_logits=True)
    agree(found, step(expected, x, output_router_logits=True))
    assert "aux_loss" in found


def fsdp(name: str) -> None:
    """Sharded before `apply`, and after."""
    x = tokens()
    expected = step(stock(name).train(), x)
    with one_process():
        for sharded_first in (True, False):
            model: Any = stock(name).train()
            if not sharded_first:
                hf.apply(model)
            for layer in model.get_decoder().layers:
                fully_shard(layer)
            fully_shard(model)
            report = hf.apply(model) if sharded_first else None
            assert report is None or len(report.replaced) > len(report.left)
            out = model(x, labels=x)
            out.loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found = {n: g.full_tensor() for n, g in grads.items()} | {"loss": out.loss.detach()}
            assert out.logits is None
            agree(found, {n: expected[n] for n in found})


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def generation(name: str) -> None:
    """Greedy, with a cache."""
    x, options = tokens(), dict(max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        found, expected = (m.generate(x, **options) for m in (applied(name), stock(name)))
    assert torch.equal(found, expected)


def checkpointing(name: str) -> None:
    x = tokens()
    expected = step(stock(name).train(), x)
    for reentrant in (False, True):
        model = applied(name).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        agree(step(model, x), expected)


def compiled(name: str) -> None:
    """The whole model in one graph."""
    torch._dynamo.reset()
    model, x = applied(name).train(), tokens()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x, labels=x).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = step(stock(name).train(), x)
    agree(found, {n: expected[n] for n in found})


def copies(name: str) -> None:
    """A copy, and one through pickle, have forwards of their own."""
    model, x = applied(name).train(), tokens()
    expected = step(stock(name).train(), x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        agree(step(other, x), expected)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        assert differences(step(other, x), expected)
    agree(step(model, x), expected)


def saved_and_loaded(name: str) -> None:
    """Trained a step and saved, the stock model loads it; saved from there, ours does."""
    model, x = applied(name), tokens()
    model(x, labels=x).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        expected = model(x).logits
    keys = list(stock(name).state_dict())
    assert list(model.state_dict()) == keys
    for other in (lambda m: m, lambda m: hf.apply(m)):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model, said = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float64,
                experts_implementation="eager",
                output_loading_info=True,
            )
        assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys"))
        other(model)
        with torch.no_grad():
            agree({"logits": model(x).logits}, {"logits": expected})


def reverted(name: str) -> None:
    model, x = applied(name), tokens()
    hf.revert(model)
    assert not [p for p, m in model.named_modules() if {"forward", "_stand_in"} & m.__dict__.keys()]
    agree(step(model, x), step(stock(name), x))


def lora(name: str) -> None:
    """Adapters on projections: before and after `apply`, the same gradients as stock's, and no new plan a step."""
    config = LoraConfig(r=2, target_modules=r".*\.(q_proj|gate_proj|up_proj|down_proj)")
    _adapted(name, config)


def lora_of_experts(name: str) -> None:
    """Adapters on the parameters of experts, which stay fused."""
    first = "up_proj" if name == "Nemotron-H" else "gate_up_proj"
    parameters = [f"experts.{first}", "experts.down_proj"]
    rules = _adapted(name, LoraConfig(r=2, target_modules=[], target_parameters=parameters))
    assert "routed_mlp" in rules


def _adapted(name: str, config: Any) -> set[str]:
    """-> the rules that fired after the first step"""
    x, steps = tokens(), []
    for order in ((), ("apply", "wrap"), ("wrap", "apply")):
        torch.manual_seed(1)
        model: Any = stock(name)
        for what in order or ("wrap",):
            if what == "apply":
                hf.apply(model)
            else:
                model = get_peft_model(model, config)
        for path, p in model.named_parameters():
            if "lora_" in path:
                torch.manual_seed(len(path))
                nn.init.normal_(p, 0.0, 0.1)
        steps.append(step(model, x))
        assert len(steps[0]) > 2
        agree(steps[-1], steps[0])
    fired: set[str] = set()
    with (
        planned() as lines,
        fo.ops.scopes.watch_plans(lambda p: fired.update(s.rule for s in p.forward)),
    ):
        for _ in range(2):
            step(model, x)
    assert not lines, lines
    return fired


@contextmanager
def planned() -> Iterator[list[str]]:
    """New plans, as the logger says them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fuseops.fusion")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


ALL = tuple(FAMILIES)
WITH_LOSS = tuple(n for n in MOE if n not in ("DeepSeek-V3", "Nemotron-H"))
FEATURES = (
    Feature("outputs and gradients", outputs_and_gradients, ALL),
    Feature("loss without logits, `shift_labels`", without_logits, ALL),
    Feature("padding, `num_items_in_batch`", padded, ALL),
    Feature("`output_router_logits`, auxiliary loss", auxiliary_loss, WITH_LOSS),
    Feature("`generate`", generation, ALL),
    Feature("gradient checkpointing", checkpointing, ALL),
    Feature("`torch.compile(fullgraph=True)`", compiled, ALL),
    Feature("FSDP2, sharded before or after", fsdp, ALL),
    Feature("`deepcopy`, `pickle`", copies, ALL),
    Feature("trained, saved, loaded by stock, and back", saved_and_loaded, ALL),
    Feature("LoRA on projections", lora, ALL),
    Feature("LoRA on experts", lora_of_experts, MOE),
    Feature("`hf.revert`", reverted, ALL),
)
