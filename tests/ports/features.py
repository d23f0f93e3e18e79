"""The rows of the compatibility table: every feature, and every pair that is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import rank_features
import torch
from port import Feature, Port
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.errors import RecomputationError

PORTS = ("qwen3_moe", "moe_block")  # modules of this folder, each with a PORT


# --- checkpoint ----------------------------------------------------------------------------------------------------


def checkpointed(port: Port, model: nn.Module, **how: Any) -> nn.Module:
    """Every block recomputed in the backward."""
    for block in port.blocks(model):
        block.forward = _Recomputed(block.forward, how)
    return model


@dataclass
class _Recomputed:
    """A forward under `checkpoint`; keywords are bound, since the reentrant one takes none."""

    forward: Callable[..., Any]
    how: dict[str, Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.how["use_reentrant"] and not any(a.requires_grad for a in args):
            # torch's own condition for any gradient; what transformers' enable_input_require_grads() does
            args = (args[0].detach().requires_grad_(), *args[1:])
        return checkpoint(partial(self.forward, **keywords), *args, **self.how)


def with_contexts(port: Port, model: nn.Module) -> nn.Module:
    return checkpointed(port, model, use_reentrant=False, context_fn=fo.checkpoint_contexts)


def configured_checkpoint(port: Port, model: nn.Module) -> nn.Module:
    """What is configured belongs to the model: the recomputation needs no context_fn."""
    fo.configure(model, disable=MLP_RULES, rules=[user_rule])
    return checkpointed(port, model, use_reentrant=False)


# --- compile -------------------------------------------------------------------------------------------------------


def compiled(
    port: Port, model: nn.Module, backend: str = "inductor", blocks: slice = slice(None)
) -> nn.Module:
    torch.compiler.reset()  # no cell may meet the recompile limit of another one
    for block in port.blocks(model)[blocks]:
        block.compile(fullgraph=True, backend=backend)
    return model


# --- numerics ------------------------------------------------------------------------------------------------------


def quantized(port: Port, model: nn.Module) -> nn.Module:
    fo.configure(model, recipe=fo.recipes.Float8CurrentScaling())
    return model


def single_precision(port: Port, model: nn.Module) -> nn.Module:
    return model.float()  # torch's autocast leaves float64 alone


# --- what trains ---------------------------------------------------------------------------------------------------


def frozen_experts(port: Port, model: nn.Module) -> nn.Module:
    for weight in port.experts(model):
        weight.requires_grad_(False)
    return model


def lora(port: Port, model: nn.Module) -> nn.Module:
    """PEFT's adapters on the port's linear layers; everything else is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=list(port.lora))
    dtype = next(model.parameters()).dtype
    model = inject_adapter_in_model(config, model).to(dtype)
    draw = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:  # B begins as zero: A would get no gradient
            weight.data = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(dtype)
    return model


# --- copies and weights --------------------------------------------------------------------------------------------


def copied(port: Port, model: nn.Module, copy: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A copy of a model that has run."""
    port.loss(model, port.batch(0))
    return copy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def reloaded(port: Port, model: nn.Module) -> nn.Module:
    """The weights go through the stock keys and back, into a model without any."""
    stock = {n: t.clone() for n, t in port.to_stock(model.state_dict()).items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    model.load_state_dict(port.to_ported(stock))
    return model


class _Functional:
    """A model with other tensors in the place of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        weights = {n: p.clone() for n, p in self._model.named_parameters()}
        return functional_call(self._model, weights, args, keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def functionally(model: nn.Module, run: Callable[[Any], Any]) -> Any:
    if hasattr(model, "_get_fsdp_state"):
        # FSDP2 looks at its parameters in the first call; from torch 2.15 on they have to be its own then
        model._get_fsdp_state()._lazy_init()
    return run(_Functional(model))


# --- a user's own --------------------------------------------------------------------------------------------------


class UserScaledSwiGLU(fo.Op):
    """ScaledSwiGLU in the words of a user who knows level 1 of the contract."""

    reads = ("probs",)

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    def fwd(self, x: Tensor, *, probs: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # one rounding, as in every op
        gate, up = x.to(wide).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)


def user_op(port: Port, model: nn.Module) -> nn.Module:
    for sequence in [m for m in model.modules() if isinstance(m, fo.Sequential)]:
        for name, op in sequence.named_children():
            if isinstance(op, fo.ops.ScaledSwiGLU):
                setattr(sequence, name, UserScaledSwiGLU())
    return model


class UserAct(fo.FusedOp):
    """fc1 and the activation in one step, where a user would call one kernel."""

    def fwd(self, x: Tensor, t: tuple[Any, ...], calls: tuple[fo.Call, ...]) -> fo.Out:
        fc1, act = self.members
        h = fc1.fwd(x, **t[0], call=calls[0])
        y = act.fwd(h.y, **t[1])
        return fo.Out(y.y, (h.saved, y.saved))


# Joint rules cover first: where this one is to fire, they are disabled.
MLP_RULES = ["routed_mlp", "grouped_mlp"]
user_rule = fo.Rule("user_act", (fo.ops.GroupedLinear, fo.ops.ScaledSwiGLU), UserAct)


@contextmanager
def user_rules(model: nn.Module) -> Iterator[None]:
    with fo.rules(user_rule), fo.fusion(disable=MLP_RULES):
        yield


def to_host(model: nn.Module) -> AbstractContextManager[Any]:
    return offload.to_host(min_bytes=0)


def autocast(model: nn.Module) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


# --- the table -----------------------------------------------------------------------------------------------------

# fmt: off
FEATURES = (
    Feature("checkpoint", with_contexts, 5, on_stock=False),
    Feature("checkpoint, reentrant", partial(checkpointed, use_reentrant=True), 5, on_stock=False),
    Feature("checkpoint, configured", configured_checkpoint, 5, on_stock=False),
    Feature("compile", compiled, 7, on_stock=False),
    Feature("gradient accumulation", micro_batches=2),
    Feature("autocast bf16", single_precision, around=autocast, rounds_to=torch.bfloat16, changes_numerics=True),
    Feature("FP8 recipe", quantized, 4, on_stock=False, changes_numerics=True),
    Feature("offload to host", around=to_host, on_stock=False),
    Feature("frozen experts", frozen_experts, 1),
    Feature("LoRA", lora, 1),
    Feature("functional_call", call=functionally, on_stock=False),
    Feature("state_dict", reloaded, 3, on_stock=False),
    Feature("deepcopy", partial(copied, copy=copy.deepcopy), 4, on_stock=False),
    Feature("pickle", partial(copied, copy=pickled), 4, on_stock=False),
    Feature("user's rule", around=user_rules, on_stock=False),
    Feature("user's op", user_op, on_stock=False),
    *rank_features.FEATURES,
)
# fmt: on

# In pairs, the first block: the graph, its joint backward and its partition, without the minutes of C++ that inductor
# writes; inductor where other tensors are saved, so that other kernels are fused.
TRACED = Feature(
    "compile", partial(compiled, backend="aot_eager", blocks=slice(1)), 7, on_stock=False
)
GENERATED = Feature("compile", partial(compiled, blocks=slice(1)), 7, on_stock=False)
WITH_INDUCTOR = {"LoRA", "frozen experts"}

Cell = tuple[Feature, ...]  # one feature alone, or a pair


def cells() -> list[Cell]:
    """Every feature alone, then every pair."""
    return [(f,) for f in FEATURES] + [pair(a, b) for a, b in itertools.combinations(FEATURES, 2)]


def pair(a: Feature, b: Feature) -> Cell:
    """Two features, with the backend of `compile` that the pair is run with."""
    short = GENERATED if {a.name, b.name} & WITH_INDUCTOR else TRACED
    return tuple(short if f.name == short.name else f for f in (a, b))


def title(cell: Cell) -> str:
    return " + ".join(f.name for f in cell)


@dataclass(frozen=True)
class Refusal:
    """A pair (or a feature) that cannot work: the error that says so, which names both sides, and why."""

    features: tuple[str, ...]
    error: type[Exception]
    match: str  # a pattern in the message
    because: str
    ports: tuple[str, ...] = PORTS


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        ("checkpoint", "compile"),
        BackendCompilerFailed,
        r"In torch\.compile mode, `context_fn` arg passed to `torch\.utils\.checkpoint`",
        "Inside a compiled region torch takes no `context_fn` of scopes. Leave it out there, since what was traced is "
        "what is recomputed (see `checkpoint, configured`), or checkpoint the compiled block.",
    ),
    Refusal(
        ("checkpoint, reentrant", "user's rule"),
        RecomputationError,
        r"recomputed under other settings than its forward.*rules was .*user_act",
        "A reentrant checkpoint cannot re-enter the `fo.rules` scope of its forward. Use `fo.configure(model, "
        "rules=...)`, or a non-reentrant checkpoint with `context_fn=fo.checkpoint_contexts`.",
    ),
    Refusal(
        ("checkpoint, configured", "user's rule"),
        RecomputationError,
        r"recomputed under other settings than its forward.*rules was .*user_act",
        "The recomputation has no `context_fn` here, so it would leave the `fo.rules` scope of its forward. Use "
        "`fo.configure(model, rules=...)`, or `context_fn=fo.checkpoint_contexts`.",
    ),
    *rank_features.refusals(Refusal),
)

NOTES = (
    "**compile** is `fullgraph=True`. Alone, it compiles every block by inductor. In pairs it compiles the first "
    "block and leaves the second as it is: by inductor with LoRA and with frozen experts, else by `aot_eager` (the "
    "same graph, joint backward and partition, without generated code).",
    "**compile**, torch 2.13: inductor may read the result of `index_add` into zeros before it is written (a CPU "
    "kernel fused past the mutation, seen with LoRA: wrong outputs, no error). The ports sum a token's rows by a "
    "gather.",
    "**compile**, torch 2.13: for the backward of a router with sigmoid scores and a balance_loss, inductor writes "
    "CPU code that reads a buffer it has given to another (UnboundLocalError). Other backends and softmax scores "
    "compile.",
    "**compile, parametrized**: each parametrization runs once a forward. With torch 2.11, whose dynamo does not see "
    "`parametrize.cached`, it runs twice, which shows in one with state (`spectral_norm`).",
    "**checkpoint** is non-reentrant, with `context_fn=fo.checkpoint_contexts`. **checkpoint, configured** is "
    "`fo.configure(model, rules=..., disable=...)` and no context_fn.",
    "**checkpoint, reentrant**: where the input of a block has no gradient (LoRA), it is made to require one, as by "
    "transformers' `enable_input_require_grads()`. Otherwise torch itself gives no gradients.",
    "**autocast**: float32 parameters, compared within 8 units of bfloat16, since fused ops keep in float32 what "
    "unfused ones round.",
    "**LoRA**: PEFT's adapters on linear layers that are ops, all else frozen.",
    "**moe_block**: router and experts are one `fo.MoE`, whose auxiliary loss is injected with the micro-batch's "
    "scale.",
    "**EP=2** is `fuseops.distributed.ExpertParallel`. Weights of experts are DTensors, which checkpoints take as "
    "they are; under FSDP2 `expert_placement` gives them a mesh of their own. Losses of routers are set to be over "
    "the tokens of a rank (`router.over = None`), as the stock model's are.",
    "**user's rule** is in a `fo.rules` scope. **user's op**, of a `fwd` alone, is in the place of `ScaledSwiGLU`.",
)


def refusal(port: str, cell: Cell) -> Refusal | None:
    """The refusal that a cell falls under."""
    names = {f.name for f in cell}
    for entry in REFUSED:
        if port in entry.ports and names >= set(entry.features):
            return entry
    return None
