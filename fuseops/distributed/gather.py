"""`quantized_gather`: FSDP2 all-gathers weights as the quantized codes that GEMMs read.

Shards, gradients and optimizer state stay in high precision. Before the all-gather each rank quantizes its own rows in
squares of 128 x 128, which no shard cuts. The result equals quantizing the gathered weight, bit for bit, at half the
bytes of bfloat16. The gathered Parameter is a carrier, whose codes the op reads.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.ops.paths import check_module, path_of
from fuseops.ops.stored import STORED, StoredWeight
from fuseops.plain import PARAMETERS
from fuseops.recipes import Layout, Recipe, weight_operand
from fuseops.recipes.carrier import placeholder
from fuseops.recipes.scaling import SQUARE
from fuseops.torch_private import pytree

BLOCK = 128


class GatheredWeight(StoredWeight):
    """A `GatheredWeight` holds the codes of a gathered weight; the op's own Parameter is a shard in high precision."""

    owns_codes = False
    made_by = "quantized_gather"
    gathered: Layout | None = None

    def codes(self) -> Layout:
        return cast("Layout", self.gathered)

    def blank_carrier(self, op: nn.Module, before: Any = None, now: Any = None) -> None:
        pass


class GatheredAsCodes(torch.Tensor):
    """A `GatheredAsCodes` is a weight, or a shard of one, with the all-gather hooks of FSDP2."""

    _weight: GatheredWeight

    __torch_function__ = torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op of tensors; the results (shards and views that FSDP2 and DTensor make) get the hooks too."""
        source = next((t for t in pytree.tree_leaves(args) if isinstance(t, cls)), None)
        with torch_private.without_subclasses():
            out = func(*args, **(kwargs or {}))
        if source is None or func._schema.is_mutable:
            return out
        wrap = lambda t: cls.of(t, source._weight) if type(t) is Tensor else t  # noqa: E731
        return pytree.tree_map(wrap, out)

    @classmethod
    def of(cls, t: Tensor, weight: GatheredWeight) -> GatheredAsCodes:
        """A tensor over the same memory, with the hooks."""
        found: GatheredAsCodes = torch_private.as_subclass(cls, t, t.requires_grad)
        found._weight = weight
        return found

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """The codes and scales of the local rows."""
        rows, world = outer_size[-2], mesh.size()
        if world == 1:
            raise FuseOpsError(
                "quantized_gather: FSDP2 gathers nothing over one rank: leave it out, the recipe quantizes the weights."
            )
        if len(outer_size) == 2 and (rows % (world * BLOCK)):
            raise FuseOpsError(
                f"quantized_gather: a weight of {tuple(outer_size)} over {world} ranks gives shards that are no "
                f"multiple of {BLOCK} rows, so that squares of {BLOCK} x {BLOCK} would lie on two of them: gather it "
                "in high precision."
            )
        if len(outer_size) == 3 and outer_size[0] % world:
            raise FuseOpsError(
                f"quantized_gather: {outer_size[0]} groups over {world} ranks: the ranks must divide them."
            )
        with torch_private.without_subclasses():
            values = torch_private.as_subclass(Tensor, self).to(mp_policy.param_dtype or self.dtype)
        q = weight_operand(values, self._weight.scaling, row=True, col=False)
        data, scale, _ = cast("Layout", q.row)
        return (data.view(torch.uint8), scale), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """A carrier for the gathered weight; its codes go to the op's `GatheredWeight`."""
        data, scale = outputs
        self._weight.gathered = Layout(data.view(self._weight.scaling.data), scale)
        if out is not None:
            return None
        carrier = placeholder(data.shape, param_dtype, data.device)
        return torch_private.as_subclass(_Strided, carrier), (data, scale)


class _Strided(torch.Tensor):
    """A `_Strided` is a carrier that ignores `as_strided`, by which FSDP2 gives it the strides of the weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.without_torch_function():
            if func is torch.as_strided:
                return torch_private.as_subclass(Tensor, args[0])
            return func(*args, **(kwargs or {}))


def quantized_gather(model: nn.Module, recipe: Recipe) -> list[str]:
    """Have FSDP2 gather the weights of GEMMs in `model` as codes of the recipe: call it before `fully_shard`.

    -> their names. Run the model under that recipe from then on, by `fo.configure(model, recipe=...)` or `fo.recipe`:
    a call that would multiply in high precision is an error, as is a shard that cuts a square of 128 x 128 (at the
    first gather).
    Raises FuseOpsError where there is no such weight, and for a recipe whose weights are not in squares of 128 x 128.
    """
    check_module("quantized_gather(model, ...)", model)
    if not isinstance(recipe, Recipe):
        raise FuseOpsError(
            f"quantized_gather: recipe is {shown(recipe)}, expected a fuseops.recipes.Recipe."
        )
    found = []
    for name, op in model.named_modules():
        weight = op._parameters.get("weight")
        if not getattr(op, "multiplies", False) or type(weight) not in PARAMETERS:
            continue
        scaling = recipe.checked_roles_of(op, path_of(op) or name).weight
        if scaling is None:
            continue
        if scaling.block != SQUARE:
            raise FuseOpsError(
                f"quantized_gather: {name} would be gathered as {scaling}; shards are quantized by themselves in "
                "squares of 128 x 128 alone (Float8BlockScaling)."
            )
        gathered = op.__dict__[STORED] = GatheredWeight(op, scaling)
        shard = GatheredAsCodes.of(weight.detach(), gathered)
        op._parameters["weight"] = nn.Parameter(shard, weight.requires_grad)
        found.append(f"{name}.weight")
    if not found:
        raise FuseOpsError(
            "quantized_gather: the model has no weights that the recipe quantizes and that are no DTensors, which are "
            "gathered in high precision."
        )
    return found
