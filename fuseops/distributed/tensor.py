"""Tensor and sequence parallelism: styles for torch's `parallelize_module`.

    model = parallelize_module(model, mesh["tp"], fuseops.distributed.tp_plan(model))

A style makes the parameters of an op DTensors, so that optimizers, FSDP2, gradient clipping and distributed checkpoints
know what they are part of, and says how the op computes with this rank's part. Ops still take and give plain tensors,
and rules fuse them. The collectives of a style run before the op and after it, as ops of the Sequential that runs it:
`explain()` shows them. They are no children, so names, positions and keys of a state_dict stay.

A `[gate | up]` weight (2F, D) becomes (2, F, D), sharded on F: every rank has its rows of both, one block of the whole
each, and a rank's part read as (2F / ranks, D) is the `[gate | up]` of an op that many times narrower, without a copy.
(Sharded on F as (F, 2, D) its rows would alternate; as two parameters they would have to be copied together in each
forward under FSDP2.) It stands in the state_dict, and in optimizer states, as (2, F, D); `load_state_dict` takes either
form, and `split_halves` gives a whole model the same, for `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fuseops import ops, torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.activations import Activation, ScaledActivation
from fuseops.ops.checks import check_flags, check_integers
from fuseops.ops.halves import is_gate
from fuseops.ops.local import InputLayout, Local, Ranks, unflatten_halves
from fuseops.ops.op import Op
from fuseops.ops.paths import path_of
from fuseops.ops.stored import stored_in
from fuseops.ops.vocab_parallel import vocabulary_over
from fuseops.run.composed import Composed

Products = (ops.Linear, ops.GroupedLinear)
log = logging.getLogger("fuseops.distributed")
OUTPUTS = {"weight": -2, "up": -2, "bias": -1}  # parameters with an axis of outputs, from the last


class _Style(ParallelStyle):
    """A `_Style` lays an op's parameters out over a mesh, with collectives around the op: the base of the styles."""

    takes: tuple[type, ...]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, self.takes):
            names = ", ".join(kind.__name__ for kind in self.takes)
            raise FuseOpsError(
                f"{type(self).__name__} lays out ops ({names}), got {type(module).__name__}: modules of torch have "
                "torch.distributed.tensor.parallel's own styles."
            )
        if device_mesh.ndim != 1:
            raise FuseOpsError(
                f"{type(self).__name__} takes a mesh of one dimension, got {device_mesh}: slice it, mesh['tp']."
            )
        check_whole(type(self).__name__, module)
        self._lay_out(module, device_mesh)
        return module

    def _lay_out(self, op: Any, mesh: DeviceMesh) -> None:
        """What it refuses it refuses before the op is another."""
        raise NotImplementedError

    def _spread(self, op: Any, name: str, mesh: DeviceMesh, axis: int | None, local: Local) -> None:
        """Make a parameter a DTensor over the mesh, sharded on an axis counted from the last, or whole (None); the op
        computes with `local` of it.
        """
        parameter = op._parameters.get(name)
        if parameter is None:
            return
        whole = parameter.detach()
        if local.axis and name not in op._local:
            whole = unflatten_halves(whole, local.axis)
        placement = Replicate() if axis is None else Shard(whole.dim() + axis)
        source = getattr(self, "src_data_rank", 0)
        op._parameters[name] = placed(parameter, whole, mesh, placement, source)
        op._local = {**op._local, name: local}


def check_whole(style: str, module: nn.Module) -> None:
    """Raise FuseOpsError where parameters are spread already, have no values, or cannot be DTensors."""
    where, stored = path_of(module) or type(module).__name__, stored_in(module)
    apart = not getattr(module, "packed", True)
    if apart or getattr(module, "accumulate_into_main_grad", False):
        raise FuseOpsError(
            f"{style}: {where} keeps {'one Parameter a group' if apart else 'gradients in main_grad'}, which DTensors "
            "have no place for: build it without."
        )
    if stored is not None and stored.owns_codes:
        raise FuseOpsError(
            f"{style}: the weight of {where} lives as {stored.scaling} (fo.quantized_init), and its Parameter has no "
            "values to spread: build the model without, and let a recipe quantize each rank's part."
        )
    for name, p in module._parameters.items():
        if torch_private.is_dtensor(type(p)):
            held: Any = p
            raise FuseOpsError(
                f"{style}: {name} of {where} is a DTensor already, over {held.device_mesh}: spread it once, and before "
                "fully_shard."
            )


def placed(
    parameter: nn.Parameter, whole: Tensor, mesh: DeviceMesh, how: Any, source: int | None = 0
) -> nn.Parameter:
    """`whole`, of a parameter, as one over the ranks. On the meta device nothing is sent."""
    made = nn.Parameter(
        distribute_tensor(whole, mesh, [how], src_data_rank=source), parameter.requires_grad
    )
    made.__dict__.update(parameter.__dict__)
    return made


class ColwiseParallel(_Style):
    """`ColwiseParallel` shards the outputs of a Linear or GroupedLinear, or the columns of a Bias, over the ranks.

    input_layouts: of x; Replicate() (default), or Shard(dim), of tokens say, which an AllGather undoes.
    output_layouts: Shard(-1) (default), or Replicate(), by an AllGather.
    gate_up: the outputs are `[gate | up]` for a gated activation: every rank gets its part of both.
    A scaled activation takes it too: the gradients of its probabilities are added up over the ranks. So does a Permute,
    before which x is then as it would be before its GroupedLinear, which gets input_layouts=Partial(). Of a
    LinearCrossEntropy each rank has its classes, as many or one less in all; the loss is the same on every rank, its
    targets are of all tokens.
    Raises FuseOpsError for another op, other layouts, or outputs that do not divide by the ranks.
    """

    takes = (*Products, ops.Bias, ScaledActivation, ops.Permute, ops.LinearCrossEntropy)

    def __init__(
        self, *, input_layouts: Any = None, output_layouts: Any = None, gate_up: bool = False
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        check_flags("ColwiseParallel", gate_up=gate_up)
        self.gate_up = gate_up
        if self.output_layouts not in (Shard(-1), Replicate()):
            raise FuseOpsError(
                f"ColwiseParallel: output_layouts is {output_layouts}, expected Shard(-1) or Replicate()."
            )
        if self.gate_up and self.output_layouts != Shard(-1):
            raise FuseOpsError("ColwiseParallel(gate_up=True): the activation takes Shard(-1).")

    def _lay_out(self, op: Any, mesh: DeviceMesh) -> None:
        if isinstance(op, ops.Permute):
            op._around = (_entry(self.input_layouts, mesh), ())
            return
        if isinstance(op, ScaledActivation):
            _sum_of_probs(op, mesh)
            return
        if isinstance(op, ops.LinearCrossEntropy):
            self._lay_out_classes(op, mesh)
            return
        alone = isinstance(op, ops.Bias)  # what comes in is sharded alike
        before = () if alone else _entry(self.input_layouts, mesh)
        attribute = "size" if alone else "out_features"
        _divide(op, attribute, mesh, 2 if self.gate_up else 1)
        for name, axis in OUTPUTS.items():
            self._spread(op, name, mesh, axis, Local(axis - 1 if self.gate_up else 0))
        self._spread(op, "down", mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        placement = Replicate() if self.input_layouts == Partial() else self.input_layouts
        op._layout = InputLayout(placement, Ranks(mesh))
        if "probs" in op.reads:
            _sum_of_probs(op, mesh)
        if alone:
            return
        after: tuple[Op[Any], ...] = ()
        if self.output_layouts == Replicate():
            after = (ops.AllGather(mesh, dim=-1, grad="replicate"),)
        op._around = (before, after)

    def _lay_out_classes(self, op: Any, mesh: DeviceMesh) -> None:
        """The op itself adds the gradient of x up over the ranks."""
        vocabulary = vocabulary_over(mesh, op.vocab_size)
        if self.input_layouts != Replicate():
            gather = ops.AllGather(mesh, dim=_dim(self.input_layouts), grad="replicate")
            op._around = ((gather,), ())
        op.vocabulary = vocabulary
        for name, axis in (("weight", -2), ("bias", -1)):
            self._spread(op, name, mesh, axis, Local())
        op._layout = InputLayout(self.input_layouts, Ranks(mesh))


class RowwiseParallel(_Style):
    """`RowwiseParallel` shards the inputs of a Linear or GroupedLinear over ranks, whose parts of every output add up.

    input_layouts: of x; Shard(-1), as `ColwiseParallel` gives it.
    output_layouts: Replicate() (default), by an AllReduce, or Shard(dim), of tokens say, by a ReduceScatter.
        Partial() leaves them to be added up by who comes later: by a Combine with this style.
    The bias is added once, by the first rank.
    Raises FuseOpsError for another op, other layouts, or inputs that do not divide by the ranks.
    """

    takes = (*Products, ops.Combine)

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()
        if (input_layouts or Shard(-1)) != Shard(-1):
            raise FuseOpsError(
                f"RowwiseParallel: input_layouts is {input_layouts}, expected Shard(-1)."
            )

    def _lay_out(self, op: Any, mesh: DeviceMesh) -> None:
        after = _exit(self.output_layouts, mesh)
        if isinstance(op, ops.Combine):
            op._around = ((), after)
            return
        _divide(op, "in_features", mesh, 1)
        for name in ("weight", "down"):
            self._spread(op, name, mesh, -1, Local())
        self._spread(op, "bias", mesh, None, Local(replicated="first", ranks=Ranks(mesh)))
        self._spread(op, "up", mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        op._layout = InputLayout(Shard(-1), Ranks(mesh))
        if "probs" in op.reads:
            _sum_of_probs(op, mesh)
        op._around = ((), after)


class SequenceParallel(_Style):
    """`SequenceParallel` runs a norm or a Bias over this rank's tokens: every rank has all of its parameters, and their
    gradients are added up.

    sequence_dim: the axis of the tokens, -2 of (T, D) and of (B, T, D).
    Raises FuseOpsError for another op, and for the axis of the features.
    """

    takes = (ops.RMSNorm, ops.LayerNorm, ops.Bias, *Products)

    def __init__(self, *, sequence_dim: int = -2) -> None:
        super().__init__()
        check_integers("SequenceParallel", sequence_dim=sequence_dim)
        if sequence_dim == -1:
            raise FuseOpsError("SequenceParallel: sequence_dim is -1, the axis of the features.")
        self.sequence_dim = sequence_dim

    def _lay_out(self, op: Any, mesh: DeviceMesh) -> None:
        for name in [*op._parameters]:
            self._spread(op, name, mesh, None, Local(replicated="sum", ranks=Ranks(mesh)))
        op._layout = InputLayout(Shard(self.sequence_dim), Ranks(mesh))


class Replicated(_Style):
    """`Replicated` has every rank run an op as one alone would: its parameters are whole, and DTensors as all others
    are, since clipping and optimizers take no mixture.
    """

    takes = (Op,)

    def _lay_out(self, op: Any, mesh: DeviceMesh) -> None:
        for name in [*op._parameters]:
            self._spread(op, name, mesh, None, Local())


def _sum_of_probs(op: Op[Any], mesh: DeviceMesh) -> None:
    """Have the ranks' gradients of a row's probability, each from its own hidden units, added up."""
    op._local = {**op._local, "probs": Local(replicated="sum", ranks=Ranks(mesh))}


def _entry(layout: Any, mesh: DeviceMesh) -> tuple[Op[Any], ...]:
    """What brings x to every rank: its gradient is the sum of theirs."""
    if layout == Partial():
        return ()
    if layout == Replicate():
        return (ops.AllReduce(mesh, forward=False, backward=True),)
    return (ops.AllGather(mesh, dim=_dim(layout)),)


def _exit(layout: Any, mesh: DeviceMesh) -> tuple[Op[Any], ...]:
    """What adds the ranks' outputs up."""
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


def _divide(op: Any, attribute: str, mesh: DeviceMesh, parts: int) -> None:
    """Make a width that of one rank.  Raises FuseOpsError where it does not divide."""
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
    """The plan of `parallelize_module` for every MLP of a model: an activation between two Linear or GroupedLinear of
    one Sequential. The first is sharded by its outputs, `[gate | up]` by both halves, the second by its inputs. A
    LinearCrossEntropy is sharded by its classes: with sequence_parallel where it stands in a Sequential that holds an
    MLP, itself or in a block.

    sequence_parallel: x and y of the MLP are sharded by tokens, on axis `sequence_dim`; norms and biases of every
        Sequential that holds an MLP, itself or in a block, work on this rank's tokens.
    Its other ops are `Replicated` without sequence_parallel; with it a warning names those that have parameters. What
    else a model has (attention, say) takes entries of yours: the plan is a dict of styles by path.
    Raises FuseOpsError where there is no MLP, and for an op that shares a parameter with another module.
    """
    plan: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        if isinstance(module, Composed):
            prefix = f"{path}." if path else ""
            found = _plan_of(module, sequence_parallel, sequence_dim)
            plan |= {f"{prefix}{name}": style for name, style in found}
    if not plan:
        raise FuseOpsError(
            f"tp_plan found no MLP in {type(model).__name__}: a fuseops.Sequential with an activation between two "
            "Linear or GroupedLinear."
        )
    left = {path: op for path, op in _ops_with_parameters(model) if path not in plan}
    if left and sequence_parallel:
        log.warning(
            "tp_plan(sequence_parallel=True) has no style for %s: their parameters stay plain, and what they do over "
            "a rank's tokens gives gradients of those alone. Add an entry for each: plan[path] = SequenceParallel().",
            ", ".join(f"{path} ({type(op).__name__})" for path, op in left.items()),
        )
    elif left:
        head = ops.LinearCrossEntropy
        styles = (
            ColwiseParallel() if isinstance(op, head) else Replicated() for op in left.values()
        )
        plan |= zip(left, styles, strict=True)
    _check_untied(model, plan)
    return plan


def _ops_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, Op) and any(p is not None for p in module._parameters.values()):
            yield path, module


def _check_untied(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise FuseOpsError where a style would make a parameter of its own of one that two modules share."""
    homes: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            first = homes.setdefault(p, path)
            if first != path and not plan.keys().isdisjoint((first, path)):
                raise FuseOpsError(
                    f"tp_plan: {name} of {path!r} is a parameter of {first!r} too, and a style lays out one op at a "
                    "time, so that they would be two from then on. Untie them, or plan the modules without: "
                    "tp_plan(model.blocks)."
                )


def _plan_of(
    module: Composed, sequence_parallel: bool, dim: int
) -> Iterator[tuple[str, ParallelStyle]]:
    children = list(module._modules.items())
    tokens = Shard(dim) if sequence_parallel else Replicate()
    mine: dict[str, ParallelStyle] = {}
    for first, act, second in _mlps(children):
        gate_up, routed = is_gate(children[act][1]), _routed(children, first, second)
        if routed and sequence_parallel:
            raise FuseOpsError(
                f"tp_plan(sequence_parallel=True): the router before {children[first][0]!r} takes every token. Leave "
                "it off for this model, or gather the tokens before its experts and write the plan by hand."
            )
        inside: Any = Partial() if routed else tokens
        mine[children[first][0]] = ColwiseParallel(input_layouts=inside, gate_up=gate_up)
        mine[children[second][0]] = RowwiseParallel(output_layouts=inside)
        if act == first + 2:
            mine[children[first + 1][0]] = ColwiseParallel(input_layouts=Shard(-1), gate_up=gate_up)
        if isinstance(children[act][1], ScaledActivation):
            mine[children[act][0]] = ColwiseParallel()
        if routed:
            mine[children[first - 1][0]] = ColwiseParallel()
            mine[children[second + 1][0]] = RowwiseParallel()
    beside = (ops.RMSNorm, ops.LayerNorm, ops.Bias)
    for name, child in children if sequence_parallel and _holds_mlp(module) else ():
        if isinstance(child, beside) and name not in mine:
            mine[name] = SequenceParallel(sequence_dim=dim)
        if isinstance(child, ops.LinearCrossEntropy):
            mine[name] = ColwiseParallel(input_layouts=tokens)
    yield from mine.items()


def _holds_mlp(module: nn.Module) -> bool:
    """Whether an MLP stands in a module, or in one below it: its x, too, is this rank's tokens."""
    composed = [m for m in module.modules() if isinstance(m, Composed)]
    return any(True for m in composed for _ in _mlps(list(m._modules.items())))


def _routed(children: list[tuple[str, nn.Module]], first: int, second: int) -> bool:
    """Whether a Permute and a Combine stand around an MLP."""
    if first < 1 or second + 1 >= len(children):
        return False
    before, after = children[first - 1][1], children[second + 1][1]
    return isinstance(before, ops.Permute) and isinstance(after, ops.Combine)


def _mlps(children: list[tuple[str, nn.Module]]) -> Iterator[tuple[int, int, int]]:
    """Positions of (product, activation, product), with a Bias between the first two or not."""
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
    """Register the `[gate | up]` weights of a whole model as (2, F, D), the form that they have under tensor
    parallelism, over the same memory: distributed checkpoints of either are then those of the other.   -> model
    """
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


def shard_placement(parameter: nn.Parameter) -> Any:
    """The axis that FSDP2 shards of a parameter, for `fully_shard(shard_placement_fn=)`: of (2, F, D) the last, since
    there are but two of the first.   -> Shard, or None for FSDP2's own choice
    """
    halves = torch_private.is_dtensor(type(parameter)) and parameter.dim() == 3
    return Shard(2) if halves and parameter.shape[0] == 2 else None
