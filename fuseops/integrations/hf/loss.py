"""The loss of a causal language model without its logits: what stands in for the forward of the model itself.

The model's own forward runs on a second self, a shallow copy with the same children but two: its head gives the hidden
states as they are, and its loss function is `ops.LinearCrossEntropy` over the head's weight. So what a model adds
around the two (auxiliary losses, slices, caches) stays its own. A model whose logits go through more than the head is
recognised by a run on a few numbers, and left alone, but for the soft cap that the loss knows.
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
from fuseops.ops.paths import LENDER, LENT

from . import recognise, stand_ins

HEAD, LOSS_MODEL, CAP = "lm_head", "_without_logits", "final_logit_softcapping"
# what the second self of a model has of its own
OWN_KEYS = {
    "forward",
    "config",
    LOSS_MODEL,
    LENT,
    "_modules",
    "_parameters",
    "_buffers",
    "_loss_function",
}


class IdentityHead(nn.Module):
    """A `PassOn` stands in the place of a head and gives what it gets: the hidden states, of which the loss makes
    what it needs.
    """

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
    """transformers' loss of a causal language model, from hidden states in the place of logits.   (..., D) -> ()"""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]  # type: ignore[arg-type]
    x, targets = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
    if not torch.is_autocast_enabled(x.device.type):  # a model may make float32 of its logits
        x = x.to(model.lm_head.weight.dtype)
    losses = model.__dict__[LENT]
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
    """As the model's own. Where a loss is asked for, logits are left out in training, and made in evaluation.

    skip_logits: leave them out, or make them.
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
    """Whether a call can do without logits: labels by name, a plain head, an output that has names."""
    names = keywords.get("return_dict")
    if names is None:
        names = getattr(model.config, "return_dict", True)
    by_name = keywords.get("labels") is not None and bool(names)
    known = keywords.get("ignore_index", IGNORED) == IGNORED and len(args) < 2
    head = model._modules[HEAD]
    return (
        by_name
        and known
        and stand_ins.not_plain_reason(head, nn.Linear) is None
        and not stand_ins.is_sharded(head)
    )


def _refresh(model: Any) -> bool:
    """Whether a model's head and loss are those that its second self was made for, which says of itself now what the
    model does.
    """
    loss_model = model.__dict__[LOSS_MODEL]
    mean = loss_model._head_losses.loss_mean
    if model._modules[HEAD] is not mean.__dict__[LENDER].owner or other_loss_reason(model):
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
    """The second self of a model, or why a loss with logits stays."""
    head = model._modules[HEAD]
    if (
        why := stand_ins.not_plain_reason(head, nn.Linear)
        or stand_ins.quantized_reason(head.weight)
    ) is not None:
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
    """A config without a soft cap."""
    config = copy.copy(config)
    object.__setattr__(config, CAP, None)  # past the checks of types: Gemma 3n's takes no None
    return config


def _build_losses(model: Any, soft_cap: float | None) -> nn.Module:
    """The loss as a mean over tokens, and as a sum."""
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
    """A `_Decoder` stands in the place of all that is below a head, and gives known hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return _StubOutputs(self.hidden)


class _StubOutputs:
    """An `_Outputs` holds hidden states, and nothing by any other name."""

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
    """None where the loss, and who asks for logits, get what the head gives, capped or as it is, and where nothing
    else is made of it.
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
    """The forward of a model with a second self. It has the parameters of the model's own, by which callers go."""
    model.__dict__[LOSS_MODEL] = loss_model
    stand_ins.attach(model, loss_model._head_losses, None)  # type: ignore[arg-type]
    bound = functools.partial(forward, model)
    known = inspect.signature(type(model).forward).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in known][1:]  # by name, as pickle needs them
    bound.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    return bound
