"""Sequential runs ops and plain modules in a row, by a plan.  Residual adds a Tap before them and an Add after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.explain import Explanation, FusionPlan, plan_of
from fuseops.ops import names as naming
from fuseops.ops import op as op_module
from fuseops.ops.op import Op
from fuseops.ops.paths import prefix_of
from fuseops.ops.structure import Add, Tap
from fuseops.recipes import Quantized
from fuseops.run import buffers, weight_grads
from fuseops.run.buffers import Buffers
from fuseops.run.compiled import forward_class
from fuseops.run.composed import Composed
from fuseops.run.run import Run
from fuseops.run.runner import Runner, runner_of, tokens_of
from fuseops.run.sides import (
    check_input,
    check_returns,
    describe_module,
    non_tensor_error,
    returned_names,
    side_inputs,
)

RESIDUAL = "<residual>"  # a side name that cannot clash with one inside a Residual


class Sequential(Composed):
    """A `Sequential` is a `torch.nn.Sequential` of ops and plain modules that plans, fuses and names what it runs.

    Children by position, or by name: `Sequential({"fc1": ..., "act": ...})`, `Sequential(fc1=..., act=...)`. State_dict
    keys, indexing, slices, iteration, `+`, `*`, append, insert and extend are `torch.nn.Sequential`'s; configuration
    comes along.

    forward(x, routing=None, *, returns=(), out=None, **side): side inputs by name, or one `Routing` that holds several.
    Returns y, or (y, *side tensors) when `returns` names some.
    out: buffers of the caller, {"fc2.y": tensor, "fc1.dx": tensor}: the output of op "fc2", and in the backward the
    gradient of the input of "fc1", are written there. Such an op fuses with no other.
    Raises SideInputError for a missing, unknown or non-tensor side input.
    """

    def forward(  # type: ignore[override]
        self,
        x: Any,
        *args: Any,
        returns: Iterable[str] | None = (),
        out: Mapping[str, Any] | None = None,
        **side: Any,
    ) -> Any:
        if is_compiling():
            return forward_class()().run(self, x, args, returns, out, side)
        returns = () if type(returns) is tuple and not returns else returned_names(returns)
        runner: Runner | None = self._runner
        if runner is None or not runner.is_current(self):
            runner = runner_of(self)
        env = {}
        if args or side or runner.reads:
            env = side_inputs(self, runner.reads, runner.writes, args, side)
        if returns:
            check_returns(self, runner.writes, returns)
        if not isinstance(x, Tensor):
            check_input(self, x)
        tokens, versions = tokens_of(self, runner), runner.versions
        outs: dict[str, Buffers] = {}
        if out is not None:
            ops = tuple([name for name, m, *_ in runner.planned if isinstance(m, Op)])
            outs = buffers.by_op(describe_module(self), out, ops)
            runner = runner.with_isolated(frozenset(outs)) if outs else runner
        path, entered = self.__dict__.get("_prefix"), False
        if path is None:
            path, entered = _enter(self) if naming.thread.observers else ("", False)
        scratch: dict[str, dict[str, Any]] = {}
        at = 0
        try:
            living = runner.live.get(returns) or runner.live_after(returns)
            for at, live in enumerate(living):  # `at` is read by the except clause
                name, piece = runner.pieces[at]
                if isinstance(piece, Run):
                    buffer = outs.get(name) if outs else None
                    x = piece(x, env, tokens, live, path, scratch, versions, buffer)
                else:
                    call = torch_private.direct_call(piece)  # blocks in blocks may be deep
                    x = call(x, **{keyword: env[name] for keyword, name in runner.piece_reads[at]})
        except Exception as error:
            if runner.pieces and not isinstance(runner.pieces[at][1], Run):
                error.add_note(f"in {runner.pieces[at][0]!r} of {describe_module(self)}")
            elif not isinstance(x, Tensor | Quantized):
                raise non_tensor_error(self, runner.pieces[at - 1 : at + 1], x) from error
            raise
        finally:
            if entered:
                naming.thread.outermost = None
        return (x, *(env[name] for name in returns)) if returns else x

    planned_forward = forward

    @property
    def reads(self) -> tuple[str, ...]:
        """Side inputs that the caller must pass."""
        return runner_of(self).reads

    def backward_dw(self) -> int:
        """Compute the delayed weight gradients of ops with `delays`, oldest backward first, into `.grad` or main_grad.

        A pipeline schedule runs them in its bubbles. Until then the activations that they read stay alive.
        -> the number of gradients.  Raises FuseOpsError for a parameter that FSDP2 has resharded since.
        """
        return weight_grads.run_delayed(self)

    def plan(
        self, x: Any, *args: Any, returns: Iterable[str] | None = (), **side: Any
    ) -> FusionPlan:
        """The FusionPlan of this call: what runs, what is not fused and why, what is saved. Runs the forward once."""
        return plan_of(self, x, *args, returns=returns, **side)

    def explain(
        self, x: Any, *args: Any, returns: Iterable[str] | None = (), **side: Any
    ) -> Explanation:
        """`plan` as text, which a notebook shows as a page with a drawing."""
        plan = self.plan(x, *args, returns=returns, **side)
        return Explanation([plan], str(plan))


def _enter(module: Sequential) -> tuple[str, bool]:
    """(prefix of saved names where no root is known, whether this becomes the outermost running Sequential)."""
    outermost = naming.thread.outermost
    if outermost is None:
        naming.thread.outermost = naming.Outermost(module)
        return "", True
    return outermost.prefix(module), False


class Residual(Sequential):
    """y = x + f(x): a Tap before and an Add after, under a private name. State_dict keys are the children's."""

    _tap: Tap
    _add: Add

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # not registered: the keys and positions of the children stay as they are
        self.__dict__["_tap"], self.__dict__["_add"] = Tap(RESIDUAL), Add(RESIDUAL)

    def _planned(self) -> list[tuple[str, nn.Module]]:
        return [("tap", self._tap), *super()._planned(), ("add", self._add)]

    def _planned_modules(self) -> tuple[nn.Module, ...]:
        return (self._tap, *super()._planned_modules(), self._add)


def _run_alone(
    op: Op[Any],
    x: Any = None,
    *args: Any,
    out: Mapping[str, Any] | None = None,
    **side: Any,
) -> Any:
    """Run one op that is called by itself: planned, saved and named as inside a Sequential."""
    if is_compiling():
        return forward_class()().run(op, x, args, op.writes, out, side)
    check_input(op, x)
    runner = runner_of(op)
    env = side_inputs(op, runner.reads, runner.writes, args, side)
    tokens = tokens_of(op, runner)
    run = runner.pieces[0][1]
    if not isinstance(run, Run):
        raise FuseOpsError(f"{type(op).__name__} is not an op")
    outs = None if out is None else buffers.by_op(type(op).__name__, out, ("",)).get("")
    y = run(x, env, tokens, tuple(op.writes), prefix_of(op) or "", {}, runner.versions, outs)
    return (y, *(env[name] for name in op.writes)) if op.writes else y


op_module.run_alone = _run_alone
op_module.run_delayed = weight_grads.run_delayed
