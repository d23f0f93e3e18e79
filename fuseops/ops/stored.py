"""Weights may live in the format of a recipe: `fuseops.quantized_init`, and FP8 checkpoints.

The op's Parameter is a carrier: it has the weight's shape, dtype and gradient, and no values. Codes and scales are two
buffers of integers, which no cast of the module reaches. GEMMs read them as they are, in either layout.
Float32 masters, where there are any, are Parameters that an optimizer has: the codes are made of them anew when they
have changed. A state_dict has the codes as `weight` and the scales as `weight_scale_inv`, values = codes * scales by
blocks of 128 x 128, as DeepSeek's checkpoints do; both come in and go out bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.recipes import Layout, Quantized, Recipe, Scaling, weight_operand
from fuseops.recipes.carrier import placeholder
from fuseops.recipes.scales import on_optimizer_step, parameter_ids
from fuseops.recipes.scaling import E4M3, E5M2, SQUARE

from . import scopes
from .paths import path_of

STORED = "_stored"  # in an op's __dict__
CODES, SCALES = "weight_codes", "weight_scales"  # buffers
SCALE_INV, MASTER = "weight_scale_inv", "weight_master"  # keys of a state_dict, beside "weight"


class StoredWeight:
    """A `StoredWeight` keeps a weight (N, K) or (E, N, K) as FP8 codes in squares of 128 x 128, for all ops whose
    Parameter it is: the first of them has the buffers.
    """

    lives = True  # there is no other; else its codes come from elsewhere

    def __init__(self, op: nn.Module, scaling: Scaling) -> None:
        self.homes, self.buffers = [op._parameters], op._buffers
        self.carrier: Any = op._parameters["weight"] if self.lives else None
        self.scaling = scaling
        self.master: nn.Parameter | None = None
        self.version: int | None = None  # of the master that the codes are of

    def __getstate__(self) -> dict[str, Any]:
        """A copy's master begins with a version of its own."""
        return self.__dict__ | {"version": None}

    def read(self, layout: str, source: Tensor) -> Quantized:
        """The weight by rows or by columns, the transposed codes.   source: the Parameter of the op that reads"""
        if any(source.stride()):
            raise FuseOpsError(
                "a weight that lives in FP8 was copied as if it had values: wrappers that shard or flatten parameters "
                "(FSDP, DTensor) do not take it. Shard first, and let a recipe quantize what is gathered."
            )
        self.check(source)
        if self.master is not None:
            self.listen()
            if not torch_private.in_backward():  # which is that of the codes that its forward read
                self.follow()
        found = self.codes()
        if layout == "row":
            return Quantized(found, None, self.scaling, None, source.dtype)
        turned = found.data.view(torch.uint8).mT.contiguous().view(found.data.dtype)
        return Quantized(
            None, Layout(turned, found.scale.mT.contiguous()), self.scaling, None, source.dtype
        )

    def check(self, source: Any) -> None:
        """Raise FuseOpsError for the Parameter of an op whose codes are not here."""
        if self.lives and source is not self.carrier and type(source) is nn.Parameter:
            raise FuseOpsError(
                "a weight that lives in FP8 (fo.quantized_init) is another Parameter than the one whose codes its op "
                "keeps: it was tied or assigned after the scope. Tie weights inside of fo.quantized_init, before it "
                "ends: ops that share a Parameter then share its codes."
            )

    def replace(self, parameter: nn.Parameter) -> None:
        """Have the ops whose Parameter the carrier is hold another in its place."""
        for home in self.homes:
            if home["weight"] is self.carrier:
                home["weight"] = parameter
        self.carrier = parameter

    def codes(self) -> Layout:
        """The codes and scales of the weight, over the buffers that hold them."""
        codes, scales = (cast("Tensor", self.buffers[name]) for name in (CODES, SCALES))
        return Layout(codes.view(self.scaling.data), scales.view(torch.float32))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight."""
        return Quantized(self.codes(), None, self.scaling, None, dtype).dequantize()

    @torch.no_grad()
    def write(self, values: Tensor, assign: bool = False) -> None:
        """Make the codes of these values, where they are."""
        row = cast("Layout", weight_operand(values, self.scaling, row=True, col=False).row)
        self.put(*row, assign)

    @torch.no_grad()
    def put(self, data: Tensor, scale: Tensor, assign: bool = False) -> None:
        """Take codes and scales as they are.   assign: these tensors, on their device, in the place of those here"""
        for name, t, raw in ((CODES, data, torch.uint8), (SCALES, scale, torch.int32)):
            given = t.contiguous().view(raw)
            if assign:
                self.buffers[name] = given
            else:
                self.buffers[name].copy_(given)  # type: ignore[union-attr]
        if assign:  # torch makes another Parameter too
            carrier = placeholder(self.carrier.shape, self.carrier.dtype, data.device)
            self.replace(nn.Parameter(carrier, self.carrier.requires_grad))
            self.listen()

    def moved(self) -> None:
        """Have autograd see that a graph which has saved the Parameter would read other codes."""
        if not self.carrier.is_inference():
            torch.autograd.graph.increment_version(self.carrier)

    def refill(self) -> None:
        """Make the codes of the master."""
        if self.master is not None:
            if self.version is not None:  # else it is a copy's, or a step has said so
                self.moved()
            self.write(self.master.detach())
            self.version = self.master._version

    def follow(self) -> None:
        """Make the codes of the master where it may have changed since they were."""
        if self.master is not None and self.master._version != self.version:
            self.refill()

    def with_master(self) -> nn.Parameter:
        """The float32 master, made of the codes where there was none, which gets the gradients of the weight."""
        if self.master is None:
            self.master = nn.Parameter(self.values(torch.float32), self.carrier.requires_grad)
            self.version = self.master._version
        self.listen()
        return self.master

    def listen(self) -> None:
        """Have the master get the gradients of the weight, from when it has any on: it may be frozen until then."""
        if self.master is None:
            return
        on_optimizer_step(_stepped)
        _with_masters.add(self)
        if not self.carrier.requires_grad:
            return
        if self._take_gradient not in (self.carrier._post_accumulate_grad_hooks or {}).values():
            self.carrier.register_post_accumulate_grad_hook(self._take_gradient)
            self.master.requires_grad_()

    @torch.no_grad()
    def _take_gradient(self, weight: Tensor) -> None:
        grad, weight.grad = weight.grad, None
        master = self.master
        if master is None or grad is None:
            return
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad

    def emptied(self, before: Any = None, now: Any = None) -> None:
        """Have the Parameter hold no values, where its codes are now.   before, now: that of an op that was moved"""
        if before is self.carrier:
            self.replace(now)
        weight, device = self.carrier, cast("Tensor", self.buffers[CODES]).device
        weight.data = placeholder(weight.shape, weight.dtype, device)
        if self.master is not None and self.master.device != device:
            self.master.data = self.master.data.to(device)


_with_masters: weakref.WeakSet[StoredWeight] = weakref.WeakSet()


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    """Of masters that were stepped, codes are old: fused optimizers move no version."""
    held = parameter_ids(optimizer) if _with_masters else set()
    for stored in _with_masters:
        master = stored.master
        if master is not None and master.grad is not None and id(master) in held:
            stored.version = None
            stored.moved()


def stored_in(op: nn.Module) -> StoredWeight | None:
    """The stored weight of an op that has one."""
    found: StoredWeight | None = op.__dict__.get(STORED)
    return found


def follow_masters(model: nn.Module) -> None:
    """Have the codes in `model` be those of its masters by now: trials that take buffers back start from there."""
    for module in model.modules():
        if (stored := stored_in(module)) is not None:
            stored.follow()


def store_weight(op: Any, scaling: Scaling, kept: dict[nn.Parameter, StoredWeight]) -> None:
    """Have the weight of an op live in a format from now on.  Raises FuseOpsError for one that cannot.

    kept: what Parameters live in already, which ops that share one share
    """
    weight = op._parameters.get("weight")
    if scaling.block != SQUARE or type(weight) is not nn.Parameter:
        what = f"a weight as {scaling}" if scaling.block != SQUARE else "no Parameter `weight`"
        raise FuseOpsError(
            f"quantized_init: {type(op).__name__} {path_of(op) or ''} has {what}; what lives in a format is one "
            "Parameter in squares of 128 x 128 (Float8BlockScaling)."
        )
    if weight in kept:
        op.__dict__[STORED] = kept[weight]
        kept[weight].homes.append(op._parameters)
        return
    if not any(weight.stride()):
        raise FuseOpsError(
            f"quantized_init: the weight of {type(op).__name__} {path_of(op) or ''} is the Parameter of an op that was "
            "made in another scope, which holds no values any more: make ops that share a weight in one scope."
        )
    row = cast("Layout", weight_operand(weight.detach(), scaling, row=True, col=False).row)
    op.register_buffer(CODES, row.data.view(torch.uint8), persistent=False)
    op.register_buffer(SCALES, row.scale.view(torch.int32), persistent=False)
    stored = op.__dict__[STORED] = kept[weight] = StoredWeight(op, scaling)
    stored.emptied()


@scopes.written
def quantized_init(recipe: Recipe) -> Iterator[None]:
    """Ops that are made inside keep their weights in the format that the recipe has for them: 1 byte a parameter.

    They run under that recipe (`fo.recipe`, `fo.configure`); a call that would multiply them in high precision is an
    error. For training give an optimizer their float32 masters: `torch.optim.AdamW(fo.masters(model))`. Weights whose
    role is high precision stay as they are. Ops that share a Parameter share its codes and its master.
    Raises FuseOpsError for what is no recipe, and on the way out for a recipe whose weights are not in squares of
    128 x 128, for groups that are Parameters of their own, and for a Parameter that would live in a format in one
    module and not in another.
    """
    if not isinstance(recipe, Recipe):
        raise FuseOpsError(
            f"fo.quantized_init: recipe is {recipe!r:.80}, expected a fuseops.recipes.Recipe."
        )
    made: dict[nn.Module, None] = {}

    def seen(module: nn.Module, name: str, parameter: Any) -> None:
        made[module] = None

    hook = register_module_parameter_registration_hook(seen)
    try:
        yield
    finally:
        hook.remove()
    new = [op for op in made if getattr(op, "multiplies", False) and stored_in(op) is None]
    formats = {op: recipe.checked_roles_of(op, path_of(op) or "").weight for op in new}
    _check_shared(made, formats)
    kept: dict[nn.Parameter, StoredWeight] = {}
    for op, scaling in formats.items():
        if scaling is not None:
            store_weight(op, scaling, kept)


def _check_shared(modules: Iterable[nn.Module], formats: dict[nn.Module, Scaling | None]) -> None:
    """Raise FuseOpsError where modules share a Parameter that would not live in one format in all of them."""
    found: dict[nn.Parameter, tuple[str, Scaling | None]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            scaling = formats.get(module) if name == "weight" else None
            mine = f"{name} of {type(module).__name__} {path_of(module) or ''}".rstrip()
            if parameter is None or parameter not in found:
                found.update({} if parameter is None else {parameter: (mine, scaling)})
            elif found[parameter][1] != scaling:
                first, other = found[parameter]
                raise FuseOpsError(
                    f"quantized_init: {first} and {mine} are one Parameter, which would live as "
                    f"{other or 'high precision'} in the one and as {scaling or 'high precision'} in the other. Do not "
                    "tie them, or give them one format in the recipe."
                )


def masters(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer steps: of weights that live in a format their float32 masters, and all other parameters.

    A master begins as what the codes stand for. The gradients of its weight are moved to it, in float32, after each
    backward; before the next forward reads the codes they are made of it anew, or when `fuseops.weights_changed(model)`
    says so (in place, for a captured graph). It is in the op's state_dict, as `weight_master`, and no parameter of the
    model: zero and clip the gradients of what the optimizer has, not of `model.parameters()`.
    Raises FuseOpsError for an op that adds its gradients to `main_grad`, where a master does not see them, and for
    weights that were tied after the scope.
    """
    if not isinstance(model, nn.Module):
        raise FuseOpsError(f"masters(model) expects an nn.Module, got {type(model).__name__}.")
    stored = {}
    for name, module in model.named_modules():
        own = stored_in(module)
        if own is None or not own.lives:
            continue
        if getattr(module, "accumulate_into_main_grad", False):
            raise FuseOpsError(
                f"masters: {name or type(module).__name__} has accumulate_into_main_grad, and its gradients would not "
                "come to the master of its weight: leave it out, the master's own are float32."
            )
        own.check(module._parameters.get("weight"))
        stored[id(own.carrier)] = own
    return [stored[id(p)].with_master() if id(p) in stored else p for p in model.parameters()]


# --- state dicts


def save(op: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Put the codes in the place of a Parameter without values."""
    stored = stored_in(op)
    if stored is None or not stored.lives:
        return
    stored.check(op._parameters.get("weight"))
    stored.follow()
    state[f"{prefix}weight"], state[prefix + SCALE_INV] = stored.codes()
    if stored.master is not None:
        state[prefix + MASTER] = stored.master if keep_vars else stored.master.detach()


def load(
    op: nn.Module, state: dict[str, Any], prefix: str, errors: list[str], assign: bool = False
) -> tuple[str, ...]:
    """Take what a state_dict has for the weight: codes with their scales, bit for bit where the weight lives in them,
    else their master or what they stand for; high precision, which is quantized where the weight lives in codes.
    -> keys taken
    assign: as of `load_state_dict`
    """
    stored, key = stored_in(op), f"{prefix}weight"
    stored = stored if stored is not None and stored.lives else None
    given, scale = state.get(key), state.pop(prefix + SCALE_INV, None)
    master = None if scale is None else state.pop(prefix + MASTER, None)
    if isinstance(given, Tensor) and given.dtype in (E4M3, E5M2) and scale is not None:
        blocks = (*given.shape[:-2], *[-(-size // 128) for size in given.shape[-2:]])
        if tuple(scale.shape) != blocks:
            errors.append(
                f"{prefix}{SCALE_INV} has shape {tuple(scale.shape)}, expected {blocks}: a scale for 128 x 128."
            )
            return ()
        form = Scaling(given.dtype, SQUARE, SQUARE)
        codes = Quantized(Layout(given, scale.float()), None, form, None, torch.float32)
        if stored is None:
            state[key] = codes.dequantize() if master is None else master
        given = codes
    if stored is None or given is None or given.shape != stored.carrier.shape:
        return ()
    stored.moved()
    if isinstance(given, Quantized) and given.scaling.data is stored.scaling.data:
        stored.put(*cast("Layout", given.row), assign)
    else:
        stored.write(given.dequantize() if isinstance(given, Quantized) else given, assign)
    if master is not None or stored.master is not None:
        with torch.no_grad():
            own = stored.with_master()
            own.copy_(stored.values(torch.float32) if master is None else master)
        stored.version = own._version
    del state[key]
    return (key,)
