"""Tensor and sequence parallelism: styles for torch's `parallelize_module`.

    model = parallelize_module(model, mesh["tp"], fuseops.distributed.tp_plan(model))

A style makes the parameters of an op DTensors, for optimizers, FSDP2, gradient clipping and distributed checkpoints,
and sets how the op computes with the local shard. Ops still take and return plain tensors, and rules fuse them. The
collectives of a style run before and after the op, as ops of the Sequential that runs it, and `explain()` shows them.
They are not children, so names, positions and state_dict keys stay.

A `[gate | up]` weight (2F, D) becomes (2, F, D), sharded on F, so that each rank has its rows of both halves. The local
shard, viewed as (2F / ranks, D), is the `[gate | up]` of an op that many times narrower, without a copy. (In a weight
(F, 2, D) rows would alternate; two parameters would be concatenated in each forward under FSDP2.) In the state_dict and
in optimizer state it is (2, F, D). `load_state_dict` takes both forms, and `split_halves` gives an unsharded model the
second, for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fuseops import ops, torch_private
from fuseops.arguments import check_flags, check_integers, instance_of, is_one_of, shown
from fuseops.errors import FuseOpsError
from fuseops.ops.activations import Activation, ScaledActivation
from fuseops.ops.halves import is_gate
from fuseops.ops.local import InputLayout, Local, Ranks, unflatten_halves
from fuseops.ops.op import Op
from fuseops.ops.paths import check_module, path_of
from fuseops.ops.stored import stored_in
from fuseops.ops.vocab_parallel import vocabulary_over
from fuseops.run.composed import Composed

Products = (ops.Linear, ops.GroupedLinear)
log = logging.getLogger("fuseops.distributed")
OUTPUTS = {
    "weight": -2,
    "up": -2,
    "bias": -1,
}  # parameter -> its axis of outputs, counted from the last


class _Style(ParallelStyle):
    """A `_Style` distributes an op's parameters over a mesh and sets the collectives around the op."""

    supported: tuple[type, ...]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, self.supported):
            names = ", ".join(kind.__name__ for kind in self.supported)
            raise FuseOpsError(
                f"{type(self).__name__} lays out ops ({names}), got {type(module).__name__}: modules of torch have "
                "torch.distributed.tensor.parallel's own styles."
            )
        if device_mesh.ndim != 1:
            raise FuseOpsError(
                f"{type(self).__name__} takes a mesh of one dimension, got {device_mesh}: slice it, mesh['tp']."
            )
        check_undistributed(type(self).__name__, module)
        self._parallelize(module, device_mesh)
        return module

    def _parallelize(self, op: Any, mesh: DeviceMesh) -> None:
        """Parallelize the op in place; raise for what is not supported before changing it."""
        raise NotImplementedError

    def _distribute(
        self, op: Any, name: str, mesh: DeviceMesh, axis: int | None, local: Local
    ) -> None:
        """Make a parameter a DTensor, sharded on an axis (counted from the last) or replicated (None), which the op
        reads through `local`.
        """
        parameter = op._parameters.get(name)
        if parameter is None:
            return
        whole = parameter.detach()
        if local.axis and name not in op._local:
            whole = unflatten_halves(whole, local.axis)
        placement = Replicate() if axis is None else Shard(whole.dim() + axis)
        source = getattr(self, "src_data_rank", 0)
        op._parameters[name] = distribute_parameter(parameter, whole, mesh, placement, source)
        op._local = {**op._local, name: local}


def check_undistributed(style: str, module: nn.Module) -> None:
    """Raise FuseOpsError if parameters are DTensors already, have no values, or cannot become DTensors."""
    where, stored = path_of(module) or type(module).__name__, stored_in(module)
    split = not getattr(module, "packed", True)
    if split or getattr(module, "accumulate_into_main_grad", False):
        raise FuseOpsError(
            f"{style}: {where} keeps {'one Parameter a group' if split else 'gradients in main_grad'}, which DTensors "
            "have no place for: build it without."
        )
    if stored is not None:
        owned = "and its Parameter has no values to spread"
        gathered = "which FSDP2 gathers of whole weights alone"
        raise FuseOpsError(
            f"{style}: the weight of {where} lives as {stored.scaling} ({stored.made_by}), "
            f"{owned if stored.owns_codes else gathered}: build the model without, and let a recipe quantize each "
            "rank's part."
        )
    for name, p in module._parameters.items():
        if torch_private.is_dtensor(type(p)):
            dtensor: Any = p
            raise FuseOpsError(
                f"{style}: {name} of {where} is a DTensor already, over {dtensor.device_mesh}: spread it once, before "
                "fully_shard."
            )


def distribute_parameter(
    parameter: nn.Parameter, whole: Tensor, mesh: DeviceMesh, how: Any, source: int | None = 0
) -> nn.Parameter:
    """A Parameter with `whole` distributed over a mesh. On the meta device nothing is sent."""
    made = nn.Parameter(
        distribute_tensor(whole, mesh, [how], src_data_rank=source), parameter.requires_grad
    )
    made.__dict__.update(parameter.__dict__)
    return made


class ColwiseParallel(_Style):
    """`ColwiseParallel` shards the outputs of a Linear or GroupedLinear, or the columns of a Bias, over the ranks.

    input_layouts: of x; Replicate() (default), or Shard(dim), for example of tokens, which an AllGather gathers.
    output_layouts: Shard(-1) (default), or Replicate(), by an AllGather.
    gate_up: the outputs are `[gate | up]` of a gated activation: each rank gets its part of both halves.
    Of a scaled activation the gradients of probabilities are summed over the ranks. A Permute takes the layout of x for
    the GroupedLinear behind it, which then gets input_layouts=Partial(). Of a LinearCrossEntropy the classes are
    sharded in equal parts, the last one smaller; its loss is equal on all ranks, its targets are of all tokens.
    Raises FuseOpsError for another op, other layouts, or outputs that the ranks do not divide.
    """

    supported = (*Products, ops.Bias, ScaledActivation, ops.Permute, ops.LinearCrossEntropy)

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, gate_up: bool = False
    ) -> None:
        super().__init__()
        self.input_layouts = _placement("ColwiseParallel", "input", input_layouts, Replicate())
        self.output_layouts = _placement("ColwiseParallel", "output", output_layouts, Shard(-1))
        check_flags("ColwiseParallel", gate_up=gate_up)
        self.gate_up = gate_up
        if self.output_layouts not in (Shard(-1), Replicate()):
            raise FuseOpsError(
                f"ColwiseParallel: output_layouts is {shown(output_layouts)}, expected Shard(-1) or Replicate()."
            )
        if self.gate_up and self.output_layouts != Shard(-1):
            raise FuseOpsError("ColwiseParallel(gate_up=True): the activation takes Shard(-1).")

    def _parallelize(self, op: Any, mesh: DeviceMesh) -> None:
        if isinstance(op, ops.Permute):
            op._around = (_input_collectives(self.input_layouts, mesh), ())
            return
        if isinstance(op, ScaledActivation):
            _sum_probs_grads(op, mesh)
            return
        if isinstance(op, ops.LinearCrossEntropy):
            self._parallelize_classes(op, mesh)
            return
        is_bias = isinstance(op, ops.Bias)  # its x is sharded already
        before = () if is_bias else _input_collectives(self.input_layouts, mesh)
        attribute = "size" if is_bias else "out_features"
        _divide_width(op, attribute, mesh, 2 if self.gate_up else 1)
        for name, axis in OUTPUTS.items():
            self._distribute(op, name, mesh, axis, Local(axis - 1 if self.gate_up else 0))
        self._distribute(op, "down", mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        placement = Replicate() if self.input_layouts == Partial() else self.input_layouts
        op._layout = InputLayout(placement, Ranks(mesh))
        if "probs" in op.reads:
            _sum_probs_grads(op, mesh)
        if is_bias:
            return
        after: tuple[Op[Any], ...] = ()
        if self.output_layouts == Replicate():
            after = (ops.AllGather(mesh, dim=-1, grad="replicate"),)
        op._around = (before, after)

    def _parallelize_classes(self, op: Any, mesh: DeviceMesh) -> None:
        """Shard a LinearCrossEntropy by classes; the op itself sums the gradient of x over the ranks."""
        vocabulary = vocabulary_over(mesh, op.vocab_size)
        if self.input_layouts != Replicate():
            gather = ops.AllGather(mesh, dim=_dim(self.input_layouts), grad="replicate")
            op._around = ((gather,), ())
        op.vocabulary = vocabulary
        for name, axis in (("weight", -2), ("bias", -1)):
            self._distribute(op, name, mesh, axis, Local())
        op._layout = InputLayout(self.input_layouts, Ranks(mesh))


class RowwiseParallel(_Style):
    """`RowwiseParallel` shards the inputs of a Linear or GroupedLinear over ranks; their outputs are partial sums.

    input_layouts: of x; Shard(-1), as `ColwiseParallel` gives it.
    output_layouts: Replicate() (default), by an AllReduce, or Shard(dim), for example of tokens, by a ReduceScatter.
        With Partial() they stay partial sums, which a later Combine with this style adds up.
    The first rank alone adds the bias.
    Raises FuseOpsError for another op, other layouts, or inputs that the ranks do not divide.
    """

    supported = (*Products, ops.Combine)

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None) -> None:
        super().__init__()
        self.output_layouts = _placement("RowwiseParallel", "output", output_layouts, Replicate())
        if not is_one_of(input_layouts, (None, Shard(-1))):
            raise FuseOpsError(
                f"RowwiseParallel: input_layouts is {shown(input_layouts)}, expected Shard(-1)."
            )

    def _parallelize(self, op: Any, mesh: DeviceMesh) -> None:
        after = _output_collectives(self.output_layouts, mesh)
        if isinstance(op, ops.Combine):
            op._around = ((), after)
            return
        _divide_width(op, "in_features", mesh, 1)
        for name in ("weight", "down"):
            self._distribute(op, name, mesh, -1, Local())
        self._distribute(op, "bias", mesh, None, Local(replicated="first", ranks=Ranks(mesh)))
        self._distribute(op, "up", mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        op._layout = InputLayout(Shard(-1), Ranks(mesh))
        if "probs" in op.reads:
            _sum_probs_grads(op, mesh)
        op._around = ((), after)


class SequenceParallel(_Style):
    """`SequenceParallel` runs a norm or a Bias over this rank's tokens: its parameters are replicated, and their
    gradients are summed over the ranks.

    sequence_dim: the axis of the tokens, -2 of (T, D) and of (B, T, D).
    Raises FuseOpsError for another op, and for the axis of the features.
    """

    supported = (ops.RMSNorm, ops.LayerNorm, ops.Bias, *Products)

    def __init__(self, *, sequence_dim: int = -2) -> None:
        super().__init__()
        check_integers("SequenceParallel", sequence_dim=sequence_dim)
        if sequence_dim == -1:
            raise FuseOpsError("SequenceParallel: sequence_dim is -1, the axis of the features.")
        self.sequence_dim = sequence_dim

    def _parallelize(self, op: Any, mesh: DeviceMesh) -> None:
        for name in [*op._parameters]:
            self._distribute(op, name, mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        op._layout = InputLayout(Shard(self.sequence_dim), Ranks(mesh))


class Replicated(_Style):
    """`Replicated` has every rank run the whole op. Its parameters become replicated DTensors, because clipping and
    optimizers do not take a mixture of DTensors and plain tensors.
    """

    supported = (Op,)

    def _parallelize(self, op: Any, mesh: DeviceMesh) -> None:
        for name in [*op._parameters]:
            self._distribute(op, name, mesh, None, Local())


def _sum_probs_grads(op: Op[Any], mesh: DeviceMesh) -> None:
    """Sum the gradients of probabilities over the ranks: each rank's come from its own hidden units."""
    op._local = {**op._local, "probs": Local(replicated="sum", ranks=Ranks(mesh))}


def _placement(style: str, side: str, given: Any, default: Placement) -> Placement:
    """A layout, or the default.  Raises FuseOpsError for what is no placement."""
    what = f"{style}({side}_layouts=...)"
    expected = "a placement of torch.distributed.tensor, as Replicate() or Shard(dim), or None"
    found: Placement = default if given is None else instance_of(given, Placement, what, expected)
    return found


def _input_collectives(layout: Any, mesh: DeviceMesh) -> tuple[Op[Any], ...]:
    """The collectives that replicate x, whose gradient is the sum over the ranks."""
    if layout == Partial():
        return ()
    if layout == Replicate():
        return (ops.AllReduce(mesh, forward=False, backward=True),)
    return (ops.AllGather(mesh, dim=_dim(layout)),)


def _output_collectives(layout: Any, mesh: DeviceMesh) -> tuple[Op[Any], ...]:
    """The collectives that sum the outputs of the ranks."""
    if layout == Partial():
        return ()
    if layout == Replicate():
        return (ops.AllReduce(mesh),)
    return (ops.ReduceScatter(mesh, dim=_dim(layout)),)


def _dim(layout: Any) -> int:
    if not isinstance(layout, Shard) or layout.dim == -1:
        raise FuseOpsError(
            f"expected Replicate() or Shard(dim) of another axis than the last, got {layout}."
        )
    return int(layout.dim)


def _divide_width(op: Any, attribute: str, mesh: DeviceMesh, parts: int) -> None:
    """Divide a width of an op by the ranks.  Raises FuseOpsError where they do not divide it."""
    size, ranks = getattr(op, attribute), mesh.size()
    if size % (parts * ranks):
        of = f"{parts} halves over " if parts > 1 else ""
        raise FuseOpsError(
            f"{type(op).__name__}.{attribute} is {size}, which does not divide by {of}{ranks} ranks."
        )
    setattr(op, attribute, size // ranks)


# --- plans


def tp_plan(
    model: nn.Module, *, sequence_parallel: bool = False, sequence_dim: int = -2
) -> dict[str, ParallelStyle]:
    """The `parallelize_module` plan for every MLP of a model: an activation between two Linear or GroupedLinear of one
    Sequential. The first is sharded by its outputs, `[gate | up]` by both halves, the second by its inputs. A
    LinearCrossEntropy is sharded by its classes; with sequence_parallel only one in a Sequential that contains an MLP
    (itself or in a block).

    sequence_parallel: x and y of the MLP are sharded by tokens, on axis `sequence_dim`; norms and biases of every
        Sequential that contains an MLP work on this rank's tokens.
    Other ops are `Replicated`; with sequence_parallel a warning names those that have parameters instead. Add entries
    for other modules, such as attention: the plan is a dict of styles by path.
    Raises FuseOpsError where there is no MLP, and for an op that shares a parameter with another module.
    """
    check_module("tp_plan(model)", model)
    check_flags("tp_plan", sequence_parallel=sequence_parallel)
    check_integers("tp_plan", sequence_dim=sequence_dim)
    plan: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        if isinstance(module, Composed):
            prefix = f"{path}." if path else ""
            found = _sequential_plan(module, sequence_parallel, sequence_dim)
            plan |= {f"{prefix}{name}": style for name, style in found}
    if not plan:
        raise FuseOpsError(
            f"tp_plan found no MLP in {type(model).__name__}: a fuseops.Sequential with an activation between two "
            "Linear or GroupedLinear."
        )
    unplanned = {path: op for path, op in _ops_with_parameters(model) if path not in plan}
    if unplanned and sequence_parallel:
        log.warning(
            "tp_plan(sequence_parallel=True) has no style for %s: their parameters stay plain, and what they do over "
            "a rank's tokens gives gradients of those alone. Add an entry for each: plan[path] = SequenceParallel().",
            ", ".join(f"{path} ({type(op).__name__})" for path, op in unplanned.items()),
        )
    elif unplanned:
        head = ops.LinearCrossEntropy
        styles = (
            ColwiseParallel() if isinstance(op, head) else Replicated() for op in unplanned.values()
        )
        plan |= zip(unplanned, styles, strict=True)
    _check_untied(model, plan)
    return plan


def _ops_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, Op) and any(p is not None for p in module._parameters.values()):
            yield path, module


def _check_untied(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise FuseOpsError for a planned parameter that two modules share: a style would untie it."""
    first_paths: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            first = first_paths.setdefault(p, path)
            if first != path and not plan.keys().isdisjoint((first, path)):
                raise FuseOpsError(
                    f"tp_plan: {name} of {path!r} is a parameter of {first!r} too, and a style lays out one op at a "
                    "time, so that they would be two from then on. Untie them, or plan the modules without: "
                    "tp_plan(model.blocks)."
                )


def _sequential_plan(
    module: Composed, sequence_parallel: bool, dim: int
) -> Iterator[tuple[str, ParallelStyle]]:
    children = list(module._modules.items())
    tokens = Shard(dim) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for first, act, second in _mlps(children):
        gate_up, routed = is_gate(children[act][1]), _is_routed(children, first, second)
        if routed and sequence_parallel:
            raise FuseOpsError(
                f"tp_plan(sequence_parallel=True): the router before {children[first][0]!r} takes every token. Leave "
                "it off for this model, or gather the tokens before its experts and write the plan by hand."
            )
        inside: Any = Partial() if routed else tokens
        plan[children[first][0]] = ColwiseParallel(input_layouts=inside, gate_up=gate_up)
        plan[children[second][0]] = RowwiseParallel(output_layouts=inside)
        if act == first + 2:
            plan[children[first + 1][0]] = ColwiseParallel(input_layouts=Shard(-1), gate_up=gate_up)
        if isinstance(children[act][1], ScaledActivation):
            plan[children[act][0]] = ColwiseParallel()
        if routed:
            plan[children[first - 1][0]] = ColwiseParallel()
            plan[children[second + 1][0]] = RowwiseParallel()
    per_token_ops = (ops.RMSNorm, ops.LayerNorm, ops.Bias)
    for name, child in children if sequence_parallel and _holds_mlp(module) else ():
        if isinstance(child, per_token_ops) and name not in plan:
            plan[name] = SequenceParallel(sequence_dim=dim)
        if isinstance(child, ops.LinearCrossEntropy):
            plan[name] = ColwiseParallel(input_layouts=tokens)
    yield from plan.items()


def _holds_mlp(module: nn.Module) -> bool:
    """Whether a module contains an MLP, itself or in a descendant, so that its x is this rank's tokens too."""
    composed = [m for m in module.modules() if isinstance(m, Composed)]
    return any(True for m in composed for _ in _mlps(list(m._modules.items())))


def _is_routed(children: list[tuple[str, nn.Module]], first: int, second: int) -> bool:
    """Whether an MLP is between a Permute and a Combine."""
    if first < 1 or second + 1 >= len(children):
        return False
    before, after = children[first - 1][1], children[second + 1][1]
    return isinstance(before, ops.Permute) and isinstance(after, ops.Combine)


def _mlps(children: list[tuple[str, nn.Module]]) -> Iterator[tuple[int, int, int]]:
    """Positions of (product, activation, product); a Bias may be between the first two."""
    for act, (_, child) in enumerate(children):
        if not isinstance(child, Activation | ScaledActivation) or not 0 < act < len(children) - 1:
            continue
        first = act - 2 if isinstance(children[act - 1][1], ops.Bias) else act - 1
        if first < 0:
            continue
        around = children[first][1], children[act + 1][1]
        if all(isinstance(op, Products) for op in around) and type(around[0]) is type(around[1]):
            yield first, act, act + 1


def split_halves(model: nn.Module) -> nn.Module:
    """Register the `[gate | up]` weights of an unsharded model as (2, F, D), over the same memory. This is their form
    under tensor parallelism, so that distributed checkpoints of both are interchangeable.   -> model
    """
    check_module("split_halves(model)", model)
    for module in model.modules():
        if not isinstance(module, Composed):
            continue
        children = list(module._modules.items())
        for first, act, _ in _mlps(children):
            if not is_gate(children[act][1]):
                continue
            for _, op in children[first:act]:
                _split(op)
    return model


def _split(op: Any) -> None:
    for name, axis in OUTPUTS.items():
        parameter = op._parameters.get(name)
        if parameter is not None and name not in op._local:
            halves = unflatten_halves(parameter.detach(), axis - 1)
            op._parameters[name] = nn.Parameter(halves, parameter.requires_grad)
            op._local = {**op._local, name: Local(axis - 1)}


def shard_placement(parameter: Tensor) -> Any:
    """A `shard_placement_fn` of `fully_shard` that shards (2, F, D) on the last axis, since the first has size two.

    -> Shard, or None for FSDP2's own choice
    """
    instance_of(parameter, Tensor, "shard_placement(parameter)", "a parameter of a model")
    halves = torch_private.is_dtensor(type(parameter)) and parameter.dim() == 3
    return Shard(2) if halves and parameter.shape[0] == 2 else None
