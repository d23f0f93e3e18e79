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
from fuseops.ops.paths import PARAMETER_SOURCE, STAND_IN

from . import lent, recognise

HEAD, SELF, CAP = "lm_head", "_without_logits", "final_logit_softcapping"
# what the second self of a model has of its own
OF_SECOND = {
    "forward",
    "config",
    SELF,
    STAND_IN,
    "_modules",
    "_parameters",
    "_buffers",
    "_loss_function",
}


class PassOn(nn.Module):
    """A `PassOn` stands in the place of a head and gives what it gets: the hidden states, of which the loss makes
    what it needs.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@lent.borrows("weight", "bias")
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
    losses = model.__dict__[STAND_IN]
    if num_items_in_batch is None:
        return losses.loss_mean(x, targets=targets)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(x.device)
    return losses.loss_sum(x, targets=targets) / num_items_in_batch


@lent.while_hung
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
    lent.watch(self, "_loss_function")
    lent.watch(self.config, CAP)
    wants_loss = labels is not None or keywords.get("shift_labels") is not None
    skip = self.training if skip_logits is None else skip_logits
    if labels is not None:
        keywords["labels"] = labels
    if not (wants_loss and skip and _free(self, args, keywords) and lent.asked(_follows, self)):
        return own(self, *args, **keywords)
    stand_in = self.__dict__[SELF]
    for name, module in self._modules.items():
        if name != HEAD and stand_in._modules[name] is not module:
            stand_in._modules[name] = module
    out = own(stand_in, *args, **keywords)
    return type(out)(**{k: v for k, v in out.items() if k != "logits"})


def _free(model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a call can do without logits: labels by name, a plain head, an output that has names."""
    by_name = keywords.get("labels") is not None and keywords.get("return_dict") is not False
    known = keywords.get("ignore_index", IGNORED) == IGNORED and len(args) < 2
    head = model._modules[HEAD]
    return by_name and known and lent.plain(head, nn.Linear) is None and not lent.sharded(head)


def _follows(model: Any) -> bool:
    """Whether a model's head and loss are those that its second self was made for, which says of itself now what the
    model does.
    """
    second = model.__dict__[SELF]
    mean = second.losses.loss_mean
    if model._modules[HEAD] is not mean.__dict__[PARAMETER_SOURCE].owner or why_another_loss(model):
        return False
    if getattr(model.config, CAP, None) != mean.soft_cap:
        return False
    own = model.__dict__.items()
    second.__dict__.update({k: v for k, v in own if k not in OF_SECOND})
    second.__dict__["config"] = model.config if mean.soft_cap is None else _uncapped(model.config)
    return True


# --- building


def why_another_loss(model: nn.Module) -> str | None:
    """Why the loss of a model is not the cross entropy of the next token, or None."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "unknown")
    return None if name == "ForCausalLMLoss" else f"the loss is {name}"


def build(model: Any) -> nn.Module | str:
    """The second self of a model, or why a loss with logits stays."""
    head = model._modules[HEAD]
    if (why := lent.plain(head, nn.Linear) or lent.quantized(head.weight)) is not None:
        return f"lm_head {why}"
    if (why := why_another_loss(model)) is not None:
        return why
    config, soft_cap = model.config, getattr(model.config, CAP, None)
    fits = _fits(model, config, soft_cap)
    if fits and soft_cap is not None:
        config = _uncapped(config)
        fits = _fits(model, config, None)
    if not fits:
        return "the loss reads something else than the head's logits"
    new = _second(model, config, {**model._modules, HEAD: PassOn()})
    new.__dict__["_loss_function"] = functools.partial(loss_of_hidden, model)
    new.__dict__["losses"] = _losses(model, soft_cap)
    return new


def _uncapped(config: Any) -> Any:
    """A config without a soft cap."""
    config = copy.copy(config)
    object.__setattr__(config, CAP, None)  # past the checks of types: Gemma 3n's takes no None
    return config


def _losses(model: Any, soft_cap: float | None) -> nn.Module:
    """The loss as a mean over tokens, and as a sum."""
    head, found = model.lm_head, nn.Module()
    for reduction in ("mean", "sum"):
        sizes = head.in_features, head.out_features, head.bias is not None
        op = HeadLoss(*sizes, soft_cap=soft_cap, reduction=reduction, device="meta")
        lent.lend(op, head, {"weight": "weight", "bias": "bias"})
        found.add_module(f"loss_{reduction}", op)
    return found


def _second(model: nn.Module, config: Any, modules: dict[str, Any]) -> Any:
    new = recognise.shallow(model)
    for name in ("forward", SELF):
        new.__dict__.pop(name, None)
    new.__dict__.update(config=config, _modules=modules, _parameters={}, _buffers={})
    return new


class _Decoder(nn.Module):
    """A `_Decoder` stands in the place of all that is below a head, and gives known hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return _Outputs(self.hidden)


class _Outputs:
    """An `_Outputs` holds hidden states, and nothing by any other name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None


@recognise.alone()
def _fits(model: nn.Module, config: Any, soft_cap: float | None) -> bool:
    """Whether the loss, and who asks for logits, get what the head gives, capped or as it is."""
    hidden = recognise.drawn(2, 5, 4)
    labels = torch.zeros(2, 5, dtype=torch.int64)
    seen: list[Any] = []

    def looks(logits: Any, *args: Any, **keywords: Any) -> Tensor:
        seen.append(logits)
        return torch.zeros(())

    modules: dict[str, Any] = {name: _Decoder(hidden) for name in model._modules}
    probe = _second(model, config, modules | {HEAD: PassOn()})
    probe.__dict__["_loss_function"] = looks
    keywords: dict[str, Any] = {"labels": labels, "input_ids": labels}
    if "output_router_logits" in inspect.signature(type(model).forward).parameters:
        keywords["output_router_logits"] = False
    out = recognise.tried(functools.partial(type(model).forward, probe, **keywords))
    expected = hidden if soft_cap is None else soft_cap * torch.tanh(hidden / soft_cap)
    found = (*seen, getattr(out, "logits", None))
    return len(seen) == 1 and all(recognise.same(f, expected) for f in found)


def bind(model: Any, second: nn.Module) -> Any:
    """The forward of a model with a second self. It has the parameters of the model's own, by which callers go."""
    model.__dict__[SELF] = second
    lent.hang(model, second.losses, None)  # type: ignore[arg-type]
    bound = functools.partial(forward, model)
    known = inspect.signature(type(model).forward).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in known][1:]  # by name, as pickle needs them
    bound.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    return bound
