"""MoE: a layer of experts as one Sequential of ops.

    [tokens] [shared] [swap]  router  [inject]  dispatch  permute  fc1  act  fc2  combine  [collect]  [add]

docs/moe.md has the data flow and the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fuseops import ops, torch_private
from fuseops.arguments import check_flags, check_integers, shown
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.ops.activations import Activation, ScaledActivation
from fuseops.ops.op import Op
from fuseops.recipes import Quantized
from fuseops.run.sides import describe_module, returned_names
from fuseops.run.splice import opaque_reason
from fuseops.torch_private import unsafe_view

from .sequential import Sequential

ACTIVATIONS: dict[str, tuple[type[ScaledActivation], type[Activation]]] = {
    "swiglu": (ops.ScaledSwiGLU, ops.SwiGLU),
    "clamped_swiglu": (ops.ScaledClampedSwiGLU, ops.ClampedSwiGLU),
    "situglu": (ops.ScaledSiTUGLU, ops.SiTUGLU),
    "geglu": (ops.ScaledGEGLU, ops.GEGLU),
    "qgeglu": (ops.ScaledQGEGLU, ops.QGEGLU),
    "glu": (ops.ScaledGLU, ops.GLU),
    "reglu": (ops.ScaledReGLU, ops.ReGLU),
    "sreglu": (ops.ScaledSReGLU, ops.SReGLU),
    "srelu": (ops.ScaledSReLU, ops.SReLU),
}
"""By name: (the activation of routed rows, which multiplies by the probability, the activation of shared experts)."""


class MoE(Sequential):
    """A `MoE` is a layer of a mixture of experts.   x (..., dim) -> (..., dim)

    Every token goes to the `top_k` experts that the router gives it, fc2(act(fc1(x)) * prob) each, and gets the sum.
    The children are ops under the names `router`, `dispatch`, `permute`, `fc1`, `act`, `fc2`, `combine`: replace one by
    assigning to it. No token is dropped unless there is a capacity_factor, and no call waits for the device. Over ranks
    most dispatchers have room of a fixed size, and raise where it does not suffice; the one without waits once.

    ffn: F, hidden units of an expert.  num_experts: E.  top_k: K.
    activation: a name of `ACTIVATIONS`, or an op that reads `probs`, one a row, and maps (R, ffn) or, gated, (R, 2 ffn)
        to (R, ffn), as its `out_shape` says.
    bias: of fc1 and fc2 (an expert's output is probability times its biased result).
    shared_experts: how many experts every token goes through, as one dense MLP of shared_experts * ffn hidden units;
        or a module of your own, (T, dim) -> (T, dim). Their output is added.
    ep: a DeviceMesh of one dimension whose ranks share the experts: `distributed.ExpertParallel` with its defaults.
    capacity_factor, dispatch, collect: see `ops.Dispatch`. The two ops replace the local dispatch; the experts that
        are built here are then dispatch.num_experts.
    aux: "return" publishes `router_loss` for `moe(x, returns=("router_loss",))`, and a training forward that does not
        ask for it raises SideInputError; "inject" gives it the gradient `loss_scale` in the backward instead, so that
        it crosses a Residual, plain blocks and pipeline stages.
    score, normalize, scale, expert_bias, groups, top_groups, balance_loss, z_loss, given_experts: of the router,
        see `ops.Router`; router_bias is its `bias`.
    accumulate_into_main_grad, delay_wgrad: of fc1 and fc2, see `ops.GroupedLinear`.
    Raises FuseOpsError for an unknown activation or aux, or options that exclude each other.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str | Op[Any] = "swiglu",
        bias: bool = False,
        shared_experts: int | nn.Module = 0,
        capacity_factor: float | None = None,
        ep: Any = None,
        dispatch: Op[Any] | None = None,
        collect: Op[Any] | None = None,
        aux: str = "return",
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        router_bias: bool = False,
        expert_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        balance_loss: float | None = None,
        z_loss: float | None = None,
        given_experts: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integers("MoE", 1, ffn=ffn)
        check_flags("MoE", bias=bias, router_bias=router_bias)
        if aux not in ("return", "inject"):
            raise FuseOpsError(f"MoE: aux is {shown(aux)}, expected 'return' or 'inject'.")
        _check_own(dispatch, collect, capacity_factor, ep)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        act = scaled_activation(activation)
        shared = _shared_branch(shared_experts, activation, dim, ffn, bias, where)
        route = ops.Router(
            dim, num_experts, top_k, score=score, normalize=normalize, scale=scale, bias=router_bias,
            expert_bias=expert_bias, groups=groups, top_groups=top_groups, balance_loss=balance_loss,
            z_loss=z_loss, given_experts=given_experts, **where,
        )  # fmt: skip
        injects = aux == "inject" and "router_loss" in route.writes
        into = accumulate_into_main_grad
        linear = {"accumulate_into_main_grad": into, "delay_wgrad": delay_wgrad}
        children: dict[str, nn.Module | None] = {
            "tokens": ops.Tap("tokens") if shared else None,
            "shared": shared,
            "swap": ops.Swap("tokens", "shared") if shared else None,
            "router": route,
            "inject": ops.InjectLoss().to(device) if injects else None,
            "dispatch": dispatch or ops.Dispatch(num_experts, capacity_factor),
            "permute": ops.Permute(top_k),
            **_expert_ops(dispatch, num_experts, dim, ffn, act, bias, linear | where),
            "combine": ops.Combine(top_k),
            "collect": collect,
            "add": ops.Add("shared") if shared else None,
        }
        super().__init__({name: op for name, op in children.items() if op is not None})
        self.register_load_state_dict_post_hook(_move_unsaved_from_meta)  # type: ignore[no-untyped-call]
        if ep is not None:
            _apply_expert_parallel(self, ep)

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the module. With a dispatch op that has a `mesh`, the 1-d DeviceMesh of its ranks, the
        experts are DTensors, since a distributed checkpoint would take plain tensors for replicated ones.
        """
        found: dict[str, Any] = super().state_dict(*args, **keywords)
        mesh = self._dispatch_mesh()
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            prefix = keywords.get("prefix", args[1] if len(args) > 1 else "")
            for key in self._expert_keys(prefix):
                if key in found and not torch_private.is_dtensor(type(found[key])):
                    found[key] = DTensor.from_local(found[key], mesh, [Shard(0)], run_check=False)
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any
    ) -> None:
        if self._dispatch_mesh() is not None:
            for key in self._expert_keys(prefix):
                given = state_dict.get(key)
                if torch_private.is_dtensor(type(given)) and not torch_private.is_dtensor(
                    type(self.get_parameter(key.removeprefix(prefix)))
                ):
                    state_dict[key] = given.to_local()  # type: ignore[union-attr]
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def _dispatch_mesh(self) -> Any:
        """The mesh over which the experts are sharded, None where all are on this rank."""
        mesh = getattr(self._modules.get("dispatch"), "mesh", None)
        return None if mesh is None or mesh.size() == 1 else mesh

    def _expert_keys(self, prefix: str) -> list[str]:
        own = ((fc, self._modules.get(fc)) for fc in ("fc1", "fc2"))
        return [f"{prefix}{fc}.{name}" for fc, op in own if op for name in op._parameters]

    def forward(  # type: ignore[override]
        self, x: Tensor | Quantized, *args: Any, returns: Iterable[str] | None = (), **side: Any
    ) -> Any:
        """Run the layer over the flattened tokens of x (..., dim), with the options of a Sequential."""
        returns = returned_names(returns)
        counts = self._counts_load() and self.training and torch.is_grad_enabled()
        router: Any = self._modules["router"] if counts else None
        asked = returns if router is None else (*returns, "experts")
        if isinstance(x, Quantized):  # the router reads high precision
            x = x.dequantize()
        if isinstance(x, Tensor) and x.is_nested:
            raise ShapeError(
                f"{describe_module(self)} got a nested tensor, whose tokens have no one shape: pass its values(), "
                "(tokens, dim), and put the offsets back behind it."
            )
        flat = not isinstance(x, Tensor) or x.dim() in (0, 2)  # invalid inputs are refused below
        rows = x if flat else x.reshape(-1, x.shape[-1])
        out = super().forward(rows, *args, returns=tuple(dict.fromkeys(asked)), **side)
        y, *published = out if asked else (out,)
        if router is not None:
            router.count(published[-1])
        if rows is not x or is_compiling():  # compiled segments give a view, too
            view = unsafe_view if self._output_is_unshared() else Tensor.view
            y = view(y, (*x.shape[:-1], y.shape[-1]))
        return (y, *published[: len(returns)]) if returns else y

    @torch_private.assume_constant_result
    def _output_is_unshared(self) -> bool:
        """Whether only the caller holds the last op's output, so that `unsafe_view` may reshape it.

        An in-place op on a plain view would drop FSDP2's hooks, of which torch warns.
        """
        last = next(reversed(self._modules.values()))
        return isinstance(last, ops.Combine | ops.Add) and opaque_reason(last) is None

    @torch_private.assume_constant_result
    def _counts_load(self) -> bool:
        """Whether the router has an expert_bias. Forwards then count the load in training, and only with grad enabled:
        a reentrant checkpoint runs its first forward without.
        """
        router = self._modules.get("router")
        return isinstance(router, ops.Router) and router.expert_bias is not None

    @property
    def loss_scale(self) -> Tensor:
        """The gradient, (), that a router_loss with aux="inject" gets in the backward.

        Assign a number or a device tensor before the forward of a micro-batch; its backward uses that one. A layer
        that injects no loss has no such attribute.
        """
        op = self._modules.get("inject")
        if not isinstance(op, ops.InjectLoss):
            raise AttributeError("loss_scale")
        return op.scale

    @loss_scale.setter
    def loss_scale(self, scale: float | Tensor) -> None:
        op = self._modules.get("inject")
        if not isinstance(op, ops.InjectLoss):
            raise FuseOpsError(
                "MoE has no loss_scale: build it with aux='inject', and a balance_loss or z_loss."
            )
        op.set_scale(scale)

    def with_given_experts(self) -> MoE:
        """This layer, with the same parameters, whose experts come from the caller: given(x, chosen=experts).

        chosen (T, top_k) int32, say `experts` of another run. Weights and losses are of those experts.
        """
        children = dict(self.named_children())
        children["router"] = self["router"].with_given_experts()
        return self._like(children.items())


def _check_own(dispatch: Any, collect: Any, capacity_factor: Any, ep: Any) -> None:
    """Raise FuseOpsError for ops of the caller's that do not send tokens and sums, or not by themselves."""
    if dispatch is not None and (capacity_factor, ep) != (None, None):
        raise FuseOpsError("MoE: a dispatch op of your own has its own capacity_factor and ep.")
    if not isinstance(collect, Op | None):
        raise FuseOpsError(f"MoE: collect is {shown(collect)}, expected an op or None.")
    if not (dispatch is None or (isinstance(dispatch, Op) and hasattr(dispatch, "num_experts"))):
        raise FuseOpsError(
            f"MoE: dispatch is {shown(dispatch)}, expected None, or an op that says in `num_experts` how many are here."
        )


def _apply_expert_parallel(moe: nn.Module, mesh: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    from fuseops.distributed import ExpertParallel  # which imports DTensor, for a second

    if not isinstance(mesh, DeviceMesh):
        raise FuseOpsError(
            f"MoE: ep is {shown(mesh)}, expected a DeviceMesh of one axis, as mesh['ep']."
        )
    ExpertParallel()._apply(moe, mesh)


def _move_unsaved_from_meta(moe: nn.Module, keys: Any) -> None:
    """Move tensors that no state_dict holds, a loss scale and an expert bias' counts, to the device of the weights.

    For `load_state_dict(assign=True)` into a layer that was built on meta.
    """
    router = moe._modules.get("router")
    if not isinstance(router, ops.Router) or router.weight.is_meta:
        return
    for op in (router, moe._modules.get("inject")):
        if isinstance(op, ops.Router | ops.InjectLoss):
            op._apply(
                lambda t: torch.empty_like(t, device=router.weight.device) if t.is_meta else t
            )


def scaled_activation(activation: str | Op[Any]) -> Op[Any]:
    """The activation op of a name, or that op.  Raises FuseOpsError for another name, and an op without `probs`."""
    if isinstance(activation, ScaledActivation):  # which may know them by another name
        return activation
    if isinstance(activation, Op) and "probs" in activation.reads:
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise FuseOpsError(
            f"MoE: activation is {shown(activation)}, expected one of {sorted(ACTIVATIONS)}, or an op that scales each "
            "row by its probability (it reads `probs`), such as fuseops.ops.ScaledSwiGLU()."
        )
    return ACTIVATIONS[activation][0]()


def _width_before(act: Op[Any], ffn: int) -> int:
    """The width of which an activation makes `ffn`: as wide, or twice as wide where it is gated.

    Raises FuseOpsError for one that makes it of neither.
    """
    why: ShapeError | None = None
    for width in (ffn, 2 * ffn):
        try:
            if act.out_shape((1, width)) == (1, ffn):
                return width
        except ShapeError as refused:
            why = refused
    raise FuseOpsError(
        f"MoE: activation is {shown(act)}, and its out_shape makes the {ffn} hidden units (ffn) of neither {ffn} "
        f"features nor {2 * ffn}, [gate | up]: out_shape of one of these has to be what its fwd gives, (R, {ffn})."
    ) from why


def _expert_ops(
    dispatch: Op[Any] | None,
    num_experts: int,
    dim: int,
    ffn: int,
    act: Op[Any],
    bias: bool,
    options: dict[str, Any],
) -> dict[str, Op[Any]]:
    """The ops of this rank's experts: all of them, or those of the dispatch op."""
    local_experts: int = num_experts if dispatch is None else dispatch.num_experts  # type: ignore[assignment]
    return {
        "fc1": ops.GroupedLinear(local_experts, dim, _width_before(act, ffn), bias=bias, **options),
        "act": act,
        "fc2": ops.GroupedLinear(local_experts, ffn, dim, bias=bias, scale_bias=True, **options),
    }


def _shared_branch(
    shared: int | nn.Module,
    activation: str | Op[Any],
    dim: int,
    ffn: int,
    bias: bool,
    where: dict[str, Any],
) -> nn.Module | None:
    """The dense branch: the caller's module, or an MLP with the hidden units of `shared` experts; None for 0."""
    if isinstance(shared, nn.Module):
        return shared
    check_integers("MoE", 0, shared_experts=shared)
    if shared == 0:
        return None
    if not isinstance(activation, str):
        raise FuseOpsError(
            "MoE: with an activation op of your own, pass shared_experts as a module."
        )
    scaled_activation(activation)
    act = ACTIVATIONS[activation][1]()
    hidden = shared * ffn
    return Sequential(
        {
            "fc1": ops.Linear(dim, _width_before(act, hidden), bias=bias, **where),
            "act": act,
            "fc2": ops.Linear(hidden, dim, bias=bias, **where),
        }
    )
