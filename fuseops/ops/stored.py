"""Weights may be stored only in the format of a recipe: `fuseops.quantized_init`, and FP8 checkpoints.

The op's Parameter is a carrier: it has the weight's shape, dtype and gradient, but no values. Codes and scales are two
buffers of integers, which casts of the module leave alone. GEMMs read them directly, in either layout.
Float32 masters, if any, are Parameters for an optimizer: the codes are quantized from them again when they have
changed. A state_dict has the codes as `weight` and the scales as `weight_scale_inv`, values = codes * scales by blocks
of 128 x 128, as DeepSeek's checkpoints do; both are loaded and saved bit for bit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fuseops import torch_private
from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.plain import INSTEAD_OF_WRITING, PARAMETERS, CarrierParameter
from fuseops.recipes import Layout, Quantized, Recipe, Scaling, weight_operand
from fuseops.recipes.carrier import placeholder
from fuseops.recipes.scales import on_optimizer_step, parameter_ids
from fuseops.recipes.scaling import E4M3, E5M2, SQUARE
from fuseops.words import plural

from . import scopes
from .paths import PARAMETER_SOURCE, check_module, path_of

log = logging.getLogger("fuseops")
STORED = "_stored"  # in an op's __dict__
CODES, SCALES = "weight_codes", "weight_scales"  # buffers
SCALE_INV, MASTER = "weight_scale_inv", "weight_master"  # keys of a state_dict, beside "weight"


class TensorVersion:
    """A `TensorVersion` is the memory and the version of a tensor at one time.

    Assigning `t.data` leaves the version as it is, so memory counts. The storage is referenced weakly, so that its key
    is not reused meanwhile.
    """

    def __init__(self, t: Tensor) -> None:
        self.storage = torch_private.WeakStorage(t.untyped_storage())
        self.seen = (*self._memory(t), t._version)

    def still(self, t: Tensor) -> bool:
        """Whether nobody has written to the tensor or given it other memory since."""
        return (*self._memory(t), t._version) == self.seen

    def same_memory(self, t: Tensor) -> bool:
        """Whether this is the same memory, written to or not."""
        return self._memory(t) == self.seen[:-1]

    @staticmethod
    def _memory(t: Tensor) -> tuple[Any, ...]:
        return torch_private.storage_key(t.untyped_storage()), t.storage_offset(), t.stride()


class StoredWeight:
    """A `StoredWeight` is a weight (N, K) or (E, N, K) in FP8 codes with a scale for each 128 x 128.

    All ops that share the Parameter share it; the first of them has the buffers.
    """

    owns_codes = True  # False where the codes are derived from a Parameter in high precision
    made_by = "fo.quantized_init"  # what a user called for it

    def __init__(self, op: nn.Module, scaling: Scaling) -> None:
        self.parameter_dicts, self.buffers = [op._parameters], op._buffers
        self.carrier: Any = op._parameters["weight"] if self.owns_codes else None
        self.scaling = scaling
        self.version = 0  # of the carrier, which nobody writes to but to mark it
        self._refuse_misuse()
        self.master: nn.Parameter | None = None
        self.made_frozen = False  # the master, with the weight; it thaws with the weight too
        self.quantized: TensorVersion | None = None  # the master as it was last quantized
        self.grad: weakref.ref[Tensor] | None = None  # of both, when last they had one

    def __getstate__(self) -> dict[str, Any]:
        """The state without versions and gradients: a copy's master has its own."""
        return self.__dict__ | {"quantized": None, "grad": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._refuse_misuse()

    def _refuse_misuse(self) -> None:
        """Have whoever would train the carrier as a weight raise an error of ours."""
        _alive.add(self)
        torch_private.on_ddp_wrap(_wrapped)
        on_optimizer_step(_check_step, before=True)

    def read(self, layout: str, source: Tensor) -> Quantized:
        """The weight in the layout "row" or "col", the transposed codes.   source: the Parameter of the reading op"""
        if any(source.stride()):
            raise FuseOpsError(
                "a weight that lives in FP8 (fo.quantized_init) was copied or replaced as if it had values, by a "
                "wrapper that shards or flattens parameters (FSDP, DTensor) or by functional_call. Do that to a model "
                "in high precision, and let a recipe quantize what its calls get."
            )
        self.check(source)
        self.check_unwritten()
        if self.master is not None:
            self.hook_master()
            if not torch_private.in_backward():  # which is that of the codes that its forward read
                self.agree()  # a gradient that was dropped is freed here
                self.check_reduced()
                self.sync_with_master()
        row = self.codes()
        if layout == "row":
            return Quantized(row, None, self.scaling, None, source.dtype)
        data = row.data.view(torch.uint8).mT.contiguous().view(row.data.dtype)
        col = Layout(data, row.scale.mT.contiguous())
        return Quantized(None, col, self.scaling, None, source.dtype)

    def check(self, source: Any) -> None:
        """Raise FuseOpsError unless `source`, the Parameter of an op, is the carrier of these codes."""
        if self.owns_codes and source is not self.carrier and type(source) in PARAMETERS:
            raise FuseOpsError(
                "a weight that lives in FP8 (fo.quantized_init) is another Parameter than the one whose codes its op "
                "keeps: it was tied or assigned after the scope. Tie weights inside of fo.quantized_init, before it "
                "ends: ops that share a Parameter then share its codes."
            )

    def check_unwritten(self) -> None:
        """Raise FuseOpsError if someone has written to the carrier, through a view or an `out`, which show no class."""
        if self.owns_codes and torch_private.version(self.carrier) != self.version:
            raise FuseOpsError(
                f"the weight {tuple(self.carrier.shape)} of {self.carrier.owner()} lives in FP8 (fo.quantized_init), "
                "and its Parameter, which holds no values, was written to through a view or as `out`. Its codes are as "
                f"before. {INSTEAD_OF_WRITING}"
            )

    def check_reduced(self) -> None:
        """Raise FuseOpsError where DistributedDataParallel would look for a gradient that the master has taken."""
        if self.carrier.requires_grad and torch_private.reduced_by_ddp(self.carrier):
            raise FuseOpsError(
                "a weight that lives in FP8 (fo.quantized_init) has a master, which takes its gradient before "
                f"DistributedDataParallel reduces it, so that the masters of the ranks would differ. {_INSTEAD_OF_DDP}"
            )

    def replace(self, parameter: nn.Parameter) -> None:
        """Replace the carrier by another Parameter in all ops that share it."""
        for parameters in self.parameter_dicts:
            if parameters["weight"] is self.carrier:
                parameters["weight"] = parameter
        self.carrier = parameter

    def codes(self) -> Layout:
        """The codes and scales of the weight, views of the buffers."""
        codes, scales = (cast("Tensor", self.buffers[name]) for name in (CODES, SCALES))
        return Layout(codes.view(self.scaling.data), scales.view(torch.float32))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight."""
        return Quantized(self.codes(), None, self.scaling, None, dtype).dequantize()

    @torch.no_grad()
    def quantize(self, values: Tensor, assign: bool = False) -> None:
        """Quantize these values into the buffers.   assign: as of `set_codes`"""
        row = cast("Layout", weight_operand(values, self.scaling, row=True, col=False).row)
        self.set_codes(row, assign)

    @torch.no_grad()
    def set_codes(self, row: Layout, assign: bool = False) -> None:
        """Copy codes and scales into the buffers.   assign: make these tensors the buffers, on their device"""
        for name, t, raw in ((CODES, row.data, torch.uint8), (SCALES, row.scale, torch.int32)):
            given = t.contiguous().view(raw)
            if assign:
                self.buffers[name] = given
            else:
                self.buffers[name].copy_(given)  # type: ignore[union-attr]
        if assign:  # torch's load_state_dict replaces the Parameter too
            owner = self.carrier.owner
            carrier = placeholder(self.carrier.shape, self.carrier.dtype, row.data.device)
            self.replace(nn.Parameter(carrier, self.carrier.requires_grad))
            self._blank(owner)

    def mark_changed(self) -> None:
        """Increment the version of the Parameter, so that autograd refuses graphs that have saved it."""
        if not self.carrier.is_inference():
            torch.autograd.graph.increment_version(self.carrier)
            self.version = torch_private.version(self.carrier)

    def quantize_master(self) -> None:
        """Quantize the master, if any, into the codes."""
        if self.master is not None:
            if self.quantized is not None:  # else it is a copy's, or a step has said so
                self.mark_changed()
            self.quantize(self.master.detach())
            self.mark_quantized()

    def mark_quantized(self) -> None:
        """Note that the codes are those of the master as it is now."""
        self.quantized = None if self.master is None else TensorVersion(self.master)

    def is_quantized(self, master: nn.Parameter) -> bool:
        """Whether the codes are those of the master as it is now."""
        return self.quantized is not None and self.quantized.still(master)

    def sync_with_master(self) -> None:
        """Quantize the master again if it has changed."""
        if self.master is not None and not self.is_quantized(self.master):
            self.quantize_master()

    def ensure_master(self) -> nn.Parameter:
        """The float32 master, created by dequantizing where there is none; it has the gradient of the weight."""
        if self.master is None:
            self.master = nn.Parameter(self.values(torch.float32), self.carrier.requires_grad)
            self.made_frozen = not self.carrier.requires_grad
            self.mark_quantized()
        self.hook_master()
        return self.master

    def hook_master(self) -> None:
        """Register the hooks by which the weight and its master have one gradient, once the weight requires it."""
        if self.master is None:
            return
        on_optimizer_step(_stepped)
        _with_masters.add(self)
        if not self.carrier.requires_grad:
            return
        if self._accumulated not in torch_private.post_accumulate_hooks(self.carrier).values():
            grad = self.carrier.grad
            self._set_grad(self.master.grad if grad is None else grad.float())
            self.carrier.register_hook(self._arrived)
            self.carrier.register_post_accumulate_grad_hook(self._accumulated)
        if self.made_frozen:
            self.made_frozen = False
            self.master.requires_grad_()

    def _set_grad(self, grad: Tensor | None) -> None:
        """Make one float32 tensor the gradient of the weight and of its master."""
        if self.carrier.grad_dtype is not torch.float32:
            self.carrier.grad = None
            self.carrier.grad_dtype = torch.float32
        cast("nn.Parameter", self.master).grad = self.carrier.grad = grad
        self.grad = None if grad is None else weakref.ref(grad)

    def agree(self) -> None:
        """Make the gradients of the weight and its master one again, after one of them was dropped or replaced."""
        mine, theirs = self.carrier.grad, cast("nn.Parameter", self.master).grad
        if mine is not theirs:
            known = None if self.grad is None else self.grad()
            self._set_grad(mine if theirs is known else theirs)

    def _arrived(self, grad: Tensor) -> Tensor:
        """What autograd adds to the gradient of the weight: what the hooks of the master make of it."""
        master = cast("nn.Parameter", self.master)
        self.agree()
        if master.requires_grad:
            for change in torch_private.gradient_hooks(master):
                changed = change(grad)
                grad = grad if changed is None else changed
        return grad

    def _accumulated(self, weight: Tensor) -> None:
        """Give the master the gradient of the weight, and run the hooks that autograd would run on a leaf."""
        master = cast("nn.Parameter", self.master)
        if not master.requires_grad:
            weight.grad = None
            return
        self._set_grad(weight.grad)
        for hook in [*torch_private.post_accumulate_hooks(master).values()]:
            hook(master)
        self.agree()  # an optimizer in such a hook may have dropped it

    def blank_carrier(self, op: nn.Module, before: Any = None, now: Any = None) -> None:
        """Free the values of the Parameter, on the device of its codes, and have it refuse others.

        op: one that has the Parameter   before, now: its Parameters, where it was moved
        """
        if before is self.carrier:
            self.replace(now)
        self._blank(partial(_shown, weakref.ref(op)))

    def _blank(self, owner: Callable[[], str]) -> None:
        weight, device = self.carrier, cast("Tensor", self.buffers[CODES]).device
        weight.data = placeholder(weight.shape, weight.dtype, device)
        CarrierParameter.of(weight, owner)
        self.version = torch_private.version(weight)
        self.hook_master()
        if self.master is not None and self.master.device != device:
            same_values = self.is_quantized(self.master)
            self.master.data = self.master.data.to(device)
            if same_values:
                self.mark_quantized()


def _shown(op: weakref.ref[nn.Module]) -> str:
    """The class and path of an op, for an error."""
    found = op()
    return "an op" if found is None else _class_and_path(found)


def _class_and_path(op: nn.Module) -> str:
    return f"{type(op).__name__} {path_of(op) or ''}".rstrip()


_INSTEAD_OF_DDP = (
    "Use weights in high precision and a recipe; or have the wrapper ignore these weights "
    "(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names), before it wraps), and average "
    "the gradients of fo.masters(model) over the ranks before each step."
)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise FuseOpsError for an optimizer that would update carriers, and see to the gradients of masters."""
    given = parameter_ids(optimizer) if _alive else ()
    for stored in _with_masters:
        if id(stored.master) in given:
            stored.agree()
    wrong = [s for s in _alive if id(s.carrier) in given and s.carrier.requires_grad]
    if wrong:
        raise FuseOpsError(
            f"{type(optimizer).__name__} has {plural(len(wrong), 'weight')} that live in FP8 (fo.quantized_init), "
            f"such as one of shape {tuple(wrong[0].carrier.shape)}: they hold no values to update. Give it "
            "fo.masters(model) instead of model.parameters()."
        )


def _wrapped(model: nn.Module, ignored: set[str]) -> None:
    """Have DistributedDataParallel leave the carriers of frozen weights alone: there is nothing to send or reduce.

    Raises FuseOpsError for those whose gradients it would reduce.
    """
    carriers = {
        id(own.carrier) for m in model.modules() if (own := stored_in(m)) and own.owns_codes
    }
    found = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) in carriers}
    trained = [n for n, p in found.items() if p.requires_grad and n not in ignored]
    if trained:
        raise FuseOpsError(
            f"DistributedDataParallel: {plural(len(trained), 'weight')} of the model, such as {trained[0]!r}, live in "
            "FP8 (fo.quantized_init). A float32 master takes the gradient of each before the wrapper reduces it, so "
            f"that the masters of the ranks would differ. {_INSTEAD_OF_DDP}"
        )
    ignored.update(found)


_alive: weakref.WeakSet[StoredWeight] = weakref.WeakSet()
_with_masters: weakref.WeakSet[StoredWeight] = weakref.WeakSet()


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the codes of stepped masters as stale: fused optimizers do not increment versions."""
    given = parameter_ids(optimizer) if _with_masters else ()
    for stored in _with_masters:
        master = stored.master
        if id(master) in given and master is not None and master.grad is not None:
            stored.quantized = None
            stored.mark_changed()


def stored_in(op: nn.Module) -> StoredWeight | None:
    """The stored weight of an op, or None."""
    found: StoredWeight | None = op.__dict__.get(STORED)
    return found


def sync_masters(model: nn.Module) -> None:
    """Make the codes of a model follow its masters, before a dry or recorded step restores its buffers."""
    for module in model.modules():
        if (stored := stored_in(module)) is not None:
            stored.sync_with_master()


def store_weight(op: Any, scaling: Scaling, kept: dict[nn.Parameter, StoredWeight]) -> None:
    """Replace the weight of an op by a `StoredWeight`.  Raises FuseOpsError for a weight that cannot be stored.

    kept: the stored weights by Parameter, which ops with one Parameter share
    """
    if PARAMETER_SOURCE in op.__dict__:
        raise lent_error(f"op {type(op).__name__}")
    weight = op._parameters.get("weight")
    if scaling.block != SQUARE or type(weight) not in PARAMETERS:
        what = f"a weight as {scaling}" if scaling.block != SQUARE else "no Parameter `weight`"
        name = _class_and_path(op)
        raise FuseOpsError(
            f"quantized_init: {name} has {what}; what lives in a format is one Parameter in squares of 128 x 128 "
            "(Float8BlockScaling)."
        )
    if weight in kept:
        op.__dict__[STORED] = kept[weight]
        kept[weight].parameter_dicts.append(op._parameters)
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
    stored.blank_carrier(op)


def lent_error(what: str) -> FuseOpsError:
    """The error for ops inside of `quantized_init` that run on the weights of other modules."""
    return FuseOpsError(
        f"{what} inside of fo.quantized_init: weights stay those of the modules that they are read from, which would "
        "not live in FP8. Call hf.apply, and the model, outside of the scope. Layers that are to live in FP8 are "
        "fo.MoE or a fo.Sequential, made inside of it, in the place of those modules (docs/adopt.md)."
    )


@scopes.generator_scope
def quantized_init(recipe: Recipe) -> Iterator[None]:
    """Ops that are created inside store their weights in the recipe's format for weights: 1 byte a parameter.

    They run under that recipe (`fo.recipe`, `fo.configure`); a call that would multiply them in high precision is an
    error. For training give an optimizer their float32 masters: `torch.optim.AdamW(fo.masters(model))`. Weights whose
    role is high precision stay as they are. Ops that share a Parameter share its codes and its master.
    Raises FuseOpsError for what is no recipe, and on the way out for a recipe whose weights are not in squares of
    128 x 128, for groups that are Parameters of their own, and for a Parameter that would live in a format in one
    module and not in another.
    """
    if not isinstance(recipe, Recipe):
        raise FuseOpsError(
            f"fo.quantized_init: recipe is {shown(recipe)}, expected a fuseops.recipes.Recipe."
        )
    created: dict[nn.Module, None] = {}
    here = scopes.current()

    def on_registration(module: nn.Module, name: str, parameter: Any) -> None:
        if scopes.current() is here:  # other threads make models of their own
            created[module] = None

    hook = register_module_parameter_registration_hook(on_registration)
    before, here.storing = here.storing, recipe
    try:
        yield
    finally:
        here.storing = before
        hook.remove()
    ops = [op for op in created if getattr(op, "multiplies", False) and stored_in(op) is None]
    formats = {op: recipe.checked_roles_of(op, path_of(op) or "").weight for op in ops}
    _check_shared(created, formats)
    kept: dict[nn.Parameter, StoredWeight] = {}
    for op, scaling in formats.items():
        if scaling is not None:
            store_weight(op, scaling, kept)
    others = [m for m in created if isinstance(m, nn.Linear) and not hasattr(m, "multiplies")]
    if others and not ops:
        log.warning(
            "fo.quantized_init: no weight lives in FP8. No op of fuseops that multiplies was made inside, and %s of "
            "torch or of another library (%r) keep their values.",
            plural(len(others), "module"),
            others[0],
        )


def _check_shared(modules: Iterable[nn.Module], formats: dict[nn.Module, Scaling | None]) -> None:
    """Raise FuseOpsError where modules share a Parameter that would be stored in different formats."""
    found: dict[nn.Parameter, tuple[str, Scaling | None]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            scaling = formats.get(module) if name == "weight" else None
            mine = f"{name} of {_class_and_path(module)}"
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
    """The parameters for an optimizer: the float32 masters of stored weights, and all other parameters.

    A master begins as the dequantized weight. Its gradient, in float32, is that of its weight, one tensor, to
    be zeroed and clipped by either. The codes are quantized from it again before the next forward reads them, or by
    `fuseops.weights_changed(model)` (in place, for a captured graph). It is in the op's state_dict, as `weight_master`,
    but not a parameter of the model.
    Raises FuseOpsError for an op that adds its gradients to `main_grad`, where a master does not see them, and for
    weights that were tied after the scope.
    """
    check_module("masters(model)", model)
    stored = {}
    for name, module in model.named_modules():
        own = stored_in(module)
        if own is None or not own.owns_codes:
            continue
        if getattr(module, "accumulate_into_main_grad", False):
            raise FuseOpsError(
                f"masters: {name or type(module).__name__} has accumulate_into_main_grad, and its gradients would not "
                "come to the master of its weight: leave it out, the master's own are float32."
            )
        own.check(module._parameters.get("weight"))
        stored[id(own.carrier)] = own
    return [stored[id(p)].ensure_master() if id(p) in stored else p for p in model.parameters()]


# --- state dicts


def save(op: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Replace the carrier in a state_dict by the codes, scales and master."""
    stored = stored_in(op)
    if stored is None or not stored.owns_codes:
        return
    stored.check(op._parameters.get("weight"))
    stored.sync_with_master()
    state[f"{prefix}weight"], state[prefix + SCALE_INV], _ = stored.codes()
    if stored.master is not None:
        state[prefix + MASTER] = stored.master if keep_vars else stored.master.detach()


def load(
    op: nn.Module, state: dict[str, Any], prefix: str, errors: list[str], assign: bool = False
) -> tuple[str, ...]:
    """Load a weight into a stored weight, or codes into a Parameter.   -> the keys loaded here

    Codes with scales are copied bit for bit into a stored weight of their format; for a Parameter `state` gets their
    master, or the dequantized tensor. Values in high precision are quantized into a stored weight.
    assign: as of `load_state_dict`
    """
    stored, key = stored_in(op), f"{prefix}weight"
    stored = stored if stored is not None and stored.owns_codes else None
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
    stored.mark_changed()
    if isinstance(given, Quantized) and given.scaling.data is stored.scaling.data:
        stored.set_codes(cast("Layout", given.row), assign)
    else:
        stored.quantize(given.dequantize() if isinstance(given, Quantized) else given, assign)
    if master is not None or stored.master is not None:
        with torch.no_grad():
            own = stored.ensure_master()
            own.copy_(stored.values(torch.float32) if master is None else master)
        stored.mark_quantized()
    del state[key]
    return (key,)
