"""The loss of a causal language model without materializing its logits.

The model's own forward runs on its *loss model*: a shallow copy whose head is the identity and whose loss function is
`ops.LinearCrossEntropy` over the head's weight. So auxiliary losses, slices and caches stay as the model writes them. A
probe on small tensors finds models that process their logits further; these keep their forward, unless the processing
is a soft cap, which the op supports.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import ops
from fuseops.ops.loss_options import IGNORED
from fuseops.ops.paths import PARAMETER_SOURCE, STAND_IN

from . import recognise, stand_ins

HEAD, LOSS_MODEL, CAP = "lm_head", "_without_logits", "final_logit_softcapping"
# attributes that a loss model does not copy from its model
OWN_KEYS = {
    "forward",
    "config",
    LOSS_MODEL,
    STAND_IN,
    "_modules",
    "_parameters",
    "_buffers",
    "_loss_function",
}


class IdentityHead(nn.Module):
    """An `IdentityHead` is the head of a loss model: it returns the hidden states, from which the loss is made."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@stand_ins.owner_parameters("weight", "bias")
class HeadLoss(ops.LinearCrossEntropy):
    """A `HeadLoss` is a LinearCrossEntropy over the weight and bias of a head."""


def loss_of_hidden(
    model: Any,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' loss of a causal language model.   logits: hidden states (..., D) -> ()"""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]  # type: ignore[arg-type]
    x, targets = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
    if not torch.is_autocast_enabled(x.device.type):  # a model may make float32 of its logits
        x = x.to(model.lm_head.weight.dtype)
    losses = model.__dict__[STAND_IN]
    if num_items_in_batch is None:
        return losses.loss_mean(x, targets=targets)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(x.device)
    return losses.loss_sum(x, targets=targets) / num_items_in_batch


@stand_ins.only_while_attached
def forward(
    self: nn.Module,
    *args: Any,
    labels: Tensor | None = None,
    skip_logits: bool | None = None,
    **keywords: Any,
) -> Any:
    """The model's forward, with a loss that needs no logits.

    skip_logits: return no logits where a loss is wanted; by default in training only.
    """
    own: Any = type(self).forward
    stand_ins.guard(self, "_loss_function")
    stand_ins.guard(self.config, CAP)
    wants_loss = labels is not None or keywords.get("shift_labels") is not None
    skip = self.training if skip_logits is None else skip_logits
    if labels is not None:
        keywords["labels"] = labels
    if not (
        wants_loss
        and skip
        and _can_skip_logits(self, args, keywords)
        and stand_ins.evaluate(_refresh, self)
    ):
        return own(self, *args, **keywords)
    loss_model = self.__dict__[LOSS_MODEL]
    for name, module in self._modules.items():
        if name != HEAD and loss_model._modules.get(name) is not module:
            loss_model._modules[name] = module
    out = own(loss_model, *args, **keywords)
    return type(out)(**{k: v for k, v in out.items() if k != "logits"})


def _can_skip_logits(model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a call can skip logits: labels by keyword, a plain head, an output with field names."""
    names = keywords.get("return_dict")
    if names is None:
        names = getattr(model.config, "return_dict", True)
    by_name = keywords.get("labels") is not None and bool(names)
    known = keywords.get("ignore_index", IGNORED) == IGNORED and len(args) < 2
    return by_name and known and stand_ins.is_readable(model._modules[HEAD])


def _refresh(model: Any) -> bool:
    """Copy the model's current attributes to its loss model.   -> whether its head and loss are still those that the
    loss model was built for; nothing is copied if not
    """
    loss_model = model.__dict__[LOSS_MODEL]
    mean = loss_model._head_losses.loss_mean
    if model._modules[HEAD] is not mean.__dict__[PARAMETER_SOURCE].owner or other_loss_reason(
        model
    ):
        return False
    if getattr(model.config, CAP, None) != mean.soft_cap:
        return False
    config = model.config if mean.soft_cap is None else _without_cap(model.config)
    if not loss_model._config_snapshot.matches(model):  # a penalty may have got a weight
        if _mismatch_reason(model, config, None) is not None:
            return stand_ins.warn_changed(model)
        loss_model.__dict__["_config_snapshot"] = stand_ins.ConfigSnapshot.of(model)
    own = model.__dict__.items()
    loss_model.__dict__.update({k: v for k, v in own if k not in OWN_KEYS})
    loss_model.__dict__["config"] = config
    return True


# --- building


def other_loss_reason(model: nn.Module) -> str | None:
    """Why the loss of a model is not the cross entropy of the next token, or None."""
    loss = getattr(model, "loss_function", None)
    inner = getattr(loss, "__globals__", {}).get("fixed_cross_entropy")
    for function, name in ((loss, "ForCausalLMLoss"), (inner, "fixed_cross_entropy")):
        found = getattr(function, "__name__", "unknown")
        if found != name:
            return f"the loss is {found}"
        if function.__module__ != "transformers.loss.loss_utils" or hasattr(
            function, "__wrapped__"
        ):
            return f"{name} is another function of that name"
    return None


def build(model: Any) -> nn.Module | str:
    """The loss model of a model, or the reason why its loss needs logits."""
    head = model._modules[HEAD]
    why = stand_ins.not_plain_reason(head) or stand_ins.quantized_reason(head.weight)
    if why is not None:
        return f"lm_head {why}"
    if (why := other_loss_reason(model)) is not None:
        return why
    config, soft_cap = model.config, getattr(model.config, CAP, None)
    why = _mismatch_reason(model, config, soft_cap)
    if why is None and soft_cap is not None:
        config = _without_cap(config)
        why = _mismatch_reason(model, config, None)
    if why is not None:
        return why
    new = _copy_with(model, config, {**model._modules, HEAD: IdentityHead()})
    new.__dict__["_loss_function"] = functools.partial(loss_of_hidden, model)
    new.__dict__.update(
        _head_losses=_build_losses(model, soft_cap),
        _config_snapshot=stand_ins.ConfigSnapshot.of(model),
    )
    return new


def _without_cap(config: Any) -> Any:
    """A copy of a config, without soft cap."""
    config = copy.copy(config)
    object.__setattr__(config, CAP, None)  # past the checks of types: Gemma 3n's takes no None
    return config


def _build_losses(model: Any, soft_cap: float | None) -> nn.Module:
    """A module of two ops: `loss_mean` over tokens, and `loss_sum`."""
    head, losses = model.lm_head, nn.Module()
    for reduction in ("mean", "sum"):
        sizes = head.in_features, head.out_features, head.bias is not None
        op = HeadLoss(*sizes, soft_cap=soft_cap, reduction=reduction, device="meta")
        stand_ins.bind_parameters(op, head, {"weight": "weight", "bias": "bias"})
        losses.add_module(f"loss_{reduction}", op)
    return losses


def _copy_with(model: nn.Module, config: Any, modules: dict[str, Any]) -> Any:
    new = recognise.shallow_copy(model)
    for name in ("forward", LOSS_MODEL):
        new.__dict__.pop(name, None)
    new.__dict__.update(config=config, _modules=modules, _parameters={}, _buffers={})
    return new


class _StubDecoder(nn.Module):
    """A `_StubDecoder` takes the place of the modules below a head in a probe, and returns given hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return _StubOutputs(self.hidden)


class _StubOutputs:
    """A `_StubOutputs` holds hidden states; every other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None


@recognise.isolated()
def _mismatch_reason(model: nn.Module, config: Any, soft_cap: float | None) -> str | None:
    """None if a probe shows that loss and output get the head's output, capped by `soft_cap` or not, and that the loss
    is returned as it is; else the reason.
    """
    hidden = recognise.random_tensor(2, 5, 4)
    labels = torch.zeros(2, 5, dtype=torch.int64)
    seen: list[Any] = []

    def record(logits: Any, *args: Any, **keywords: Any) -> Tensor:
        seen.append(logits)
        return torch.zeros(())

    modules: dict[str, Any] = {name: _StubDecoder(hidden) for name in model._modules}
    probe = _copy_with(model, config, modules | {HEAD: IdentityHead()})
    probe.__dict__["_loss_function"] = record
    keywords: dict[str, Any] = {"labels": labels, "input_ids": labels}
    if "output_router_logits" in inspect.signature(type(model).forward).parameters:
        keywords["output_router_logits"] = False
    out = recognise.run_forward(probe, **keywords)
    if out is recognise.MUTATED:
        return "its forward keeps something on the model"
    expected = hidden if soft_cap is None else soft_cap * torch.tanh(hidden / soft_cap)
    found = (*seen, getattr(out, "logits", None))
    if len(seen) != 1 or not all(recognise.matches(f, expected) for f in found):
        return "the loss reads something else than the head's logits"
    added = not recognise.matches(getattr(out, "loss", None), torch.zeros(()))
    return "its forward adds something to the loss" if added else None


def bind(model: Any, loss_model: nn.Module) -> Any:
    """The forward of a model that has a loss model, with the signature of the model's own, which callers inspect."""
    model.__dict__[LOSS_MODEL] = loss_model
    stand_ins.attach(model, loss_model._head_losses, None)  # type: ignore[arg-type]
    bound = functools.partial(forward, model)
    known = inspect.signature(type(model).forward).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in known][1:]  # by name, as pickle needs them
    bound.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    return bound
