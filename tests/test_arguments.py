"""Every public callable refuses what its annotations exclude, by the name of the argument, where it is given.

What the public packages state is enumerated, with the methods of public classes: a new name needs its arguments in
`BASES`, and a class an instance in `INSTANCES`, or a reason in `NOT_CALLED` or `NOT_METHODS`.
"""

import collections
import collections.abc
import functools
import inspect
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from inspect import Parameter
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from torch import nn

import fuseops as fo
from fuseops import distributed, kernels, offload, recipes, testing
from fuseops.integrations import graphs, hf, te
from fuseops.kernels.configs import SPACES
from fuseops.kernels.registry import KERNEL_OPS
from fuseops.offload import marks
from fuseops.ops import scopes
from fuseops.rules import rule as rule_module
from fuseops.testing.catalogue import Wanted, entry, exported

PACKAGES = (fo, fo.ops, recipes, offload, testing, distributed, kernels, hf)
UNSTATED = (graphs, te)  # modules without __all__: all that they define in public
Given = dict[str, Any]


def public() -> dict[Any, str]:
    """Every public callable that makes or does something with arguments, and its name."""
    found: dict[Any, str] = {}
    for module in (*PACKAGES, *UNSTATED):
        stated = [n for n, v in vars(module).items() if not n.startswith("_")
                  and getattr(v, "__module__", "") == module.__name__]  # fmt: skip
        for name in getattr(module, "__all__", stated):
            value = getattr(module, name)
            if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
                found.setdefault(value, f"{module.__name__}.{name}")
    for owner, name in [*found.items()]:
        if isinstance(owner, type):
            for own, member in vars(owner).items():
                makes = isinstance(member, (classmethod, staticmethod)) and not own.startswith("_")
                if makes and (owner not in NOT_CALLED or getattr(owner, own) in BASES):
                    found[getattr(owner, own)] = f"{name}.{own}"
            for method in methods(owner):
                OWNERS.setdefault(method, owner)
                found.setdefault(method, f"{name}.{method.__name__}")
    return found


def methods(owner: type) -> Iterator[types.FunctionType]:
    """The methods of instances that fuseops defines for a class or a base of it, and that take arguments of users."""
    for name in dir(owner):
        where = next(base for base in owner.__mro__ if name in vars(base))
        method = vars(where)[name]
        ours = where.__module__.startswith("fuseops") and not name.startswith("_")
        asked = isinstance(method, types.FunctionType) and not (
            name in NOT_METHODS or method.__qualname__ in NOT_METHODS
        )
        if ours and asked and len(inspect.signature(method).parameters) > 1:
            yield method


OWNERS: dict[Any, type] = {}
"""Method -> a public class that has it, of which it is called."""


def signature(made: Any) -> inspect.Signature:
    """The signature as its users see it: that of a method without self."""
    found = inspect.signature(made)
    return found.replace(parameters=[*found.parameters.values()][made in OWNERS :])


class Fused(fo.FusedOp):
    """The least that a rule may build."""


class Scale(fo.Op[Any]):
    """The least that an op may be."""

    def fwd(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def twin(x: torch.Tensor) -> torch.Tensor:
    """The twin of a kernel."""
    return x


def launcher() -> Callable[..., Any]:
    """A launcher that no kernel op is of yet."""

    def launch(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    launch.__name__ = launch.__qualname__ = f"launch_{next(NUMBERS)}"
    return launch


NUMBERS = itertools.count()


def mlp() -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(8, 8), fo.ops.SiLU(), fo.ops.Linear(8, 8))


def of_model(name: str = "model", **others: Any) -> Callable[[], Given]:
    return lambda: {name: mlp(), **others}


X = torch.randn(3, 8)
CURVE = offload.Hardware.h200().d2h
SCALING = recipes.Float8BlockScaling().roles()
IN_RECORDS = "a record that fuseops makes and users read"
NOT_CALLED: dict[Any, str] = {
    **dict.fromkeys([fo.Explanation, fo.FusionPlan, fo.Miss, fo.SavedTensor], IN_RECORDS),
    **dict.fromkeys([fo.Call, fo.Conditions, offload.Candidate, offload.Entry], IN_RECORDS),
    **dict.fromkeys([offload.OffloadPlan, offload.Report, hf.ApplyReport, hf.ReportEntry], IN_RECORDS),
    fo.Out: "what a fwd gives, in every forward: its fields are checked in the first call of a plan",
    fo.Grads: "what a bwd gives, in every backward: its fields are checked in the first call of a plan",
    fo.Op: "a base: what an op takes is what its subclass says",
    fo.Routing: "a pytree, of whatever its leaves are mapped to; a Sequential checks the tensors of one",
    recipes.Layout: "a component of a Quantized, made in every forward",
    recipes.Quantized: "what fo.quantize makes, in every forward; a Sequential checks one that it is given",
    recipes.Operand: "a type",
    recipes.ByName.of: "what configure(model, recipe={...}) calls, in whose words it refuses",
    kernels.launch: "runs in every call: a kernel that gets another argument says so itself",
}  # fmt: skip
"""What takes no arguments of users, and why."""

OF_OPS = (
    "the contract of ops: called in every forward or backward, with what the plan of the call says"
)
IN_PLANS = "asked while a call is planned, with what the planner made"
IN_EVERY_FORWARD = "a part of a Quantized, taken by ops in every forward"
IN_LAUNCHES = "asked in every launch"
IN_SCHEDULES = "asked for every saved tensor of a step, with what the scheduler made"
NOT_METHODS: dict[str, str] = {
    **dict.fromkeys(["fwd", "bwd", "out_shape", "out_shapes", "choices"], OF_OPS),
    **dict.fromkeys(["all_ranks_fwd", "all_ranks_bwd", "normed", "grads", "saved_of"], OF_OPS),
    **dict.fromkeys(["operand", "epsilon", "count", "registered", "sample"], OF_OPS),
    **dict.fromkeys(["roles_of", "checked_roles_of", "amax_of"], IN_PLANS),
    **dict.fromkeys(["reason_against", "Scaling.matches"], IN_PLANS),
    **dict.fromkeys(["groups", "only", "Quantized.of", "Scaling.of"], IN_EVERY_FORWARD),
    **dict.fromkeys(["pick", "candidates"], IN_LAUNCHES),
    **dict.fromkeys(["why_keep", "check"], IN_SCHEDULES),
    **dict.fromkeys(["lane_seconds", "excess"], "asked in every step of a planner's search"),
    "make_plan": "the hook of a module's first forward",
    "state_dict": "torch's, which passes on what it is given",
    "owner": "with a Simulation, which a plan has",
}  # fmt: skip
"""Methods of public classes that take no arguments of users, by name, and why."""


def topk() -> Given:
    return {"experts": torch.tensor([[0], [1]]), "weights": torch.rand(2, 1)}


@functools.cache
def explained() -> fo.Explanation:
    return mlp().explain(X)


@functools.cache
def planned() -> offload.OffloadPlan:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return offload.plan(model, torch.randn(2, 4, requires_grad=True), layers="*", min_bytes=0)


def with_grads() -> list[nn.Parameter]:
    model = mlp()
    model(X).sum().backward()
    return [*model.parameters()]


ACTION = SimpleNamespace(
    computation_type=SimpleNamespace(value="F"), microbatch_index=0, stage_index=0
)
SCHEDULE = SimpleNamespace(pipeline_order={0: [ACTION]})

BASES: dict[Any, Callable[[], Given]] = {
    fo.MoE: lambda: {"dim": 8, "ffn": 8, "num_experts": 4, "top_k": 2},
    fo.FusedOp: dict,
    fo.Sequential: dict,
    fo.Residual: dict,
    fo.Routing.from_counts: lambda: {"tokens_per_expert": [1, 2]},
    fo.Routing.from_topk: topk,
    fo.Routing.from_multihot: lambda: {"chosen": torch.eye(2).bool(), "probs": torch.rand(2, 2)},
    fo.Rule: lambda: {"name": "mine", "pattern": (fo.ops.Linear,), "build": Fused},
    fo.maybe: lambda: {"wanted": fo.ops.Bias},
    fo.require: lambda: {"holds": True, "reason": "why"},
    fo.recipe: lambda: {"value": recipes.Float8BlockScaling()},
    fo.quantized_init: lambda: {"recipe": recipes.MXFP8BlockScaling()},
    fo.linear_cross_entropy: lambda: {
        "input": torch.randn(3, 4), "linear_weight": torch.randn(5, 4), "target": torch.tensor([1, 2, 3])
    },
    fo.linear_loss: lambda: {
        "loss": torch.sum, "input": torch.randn(3, 4), "linear_weight": torch.randn(5, 4)
    },
    **{
        of: of_model() for of in (
            fo.configure, fo.masters, fo.weights_changed, hf.apply, hf.revert,
            distributed.param_groups, distributed.split_halves, distributed.tp_plan,
        )
    },
    **{of: of_model(args=(X,)) for of in (fo.explain, fo.plans)},
    **{of: of_model(inputs=(X,)) for of in (testing.assert_fused_matches_unfused, testing.bisect)},
    offload.plan: lambda: {"model": nn.Sequential(nn.Linear(8, 8)), "sample": (X,)},
    **{
        of: of_model("module")
        for of in (distributed.delay_weight_gradients, distributed.dw_builder, graphs.Positional)
    },
    testing.assert_bwd_is_vjp: lambda: {"op": Scale(), "inputs": (X,)},
    testing.assert_no_rule_is_shadowed: lambda: {"rules": []},
    recipes.quantize: lambda: {"x": torch.randn(4, 128), "scaling": SCALING.input},
    recipes.operand: lambda: {"x": torch.randn(4, 128), "scaling": SCALING.input},
    recipes.weight_operand: lambda: {
        "weight": torch.randn(128, 128), "scaling": SCALING.weight, "row": True, "col": True
    },
    recipes.columns_follow: lambda: {"scaling": SCALING.input},
    recipes.ByRole: lambda: {"choose": lambda op, name, role: None},
    recipes.ByName: lambda: {"choices": (("**", None),)},
    offload.Scheduler: lambda: {"model": nn.Sequential(nn.Linear(4, 4)), "layers": "*"},
    offload.Hardware: lambda: {"name": "mine", "d2h": CURVE, "h2d": CURVE, "both": CURVE, "memory": 1.0},
    offload.Hardware.load: lambda: {"path": "none.json"},
    offload.Hardware.from_json: lambda: {"data": offload.Hardware.h200().to_json()},
    offload.Hardware.slowest: lambda: {"found": [offload.Hardware.h200()]},
    offload.Pipeline: lambda: {"ranks": 1, "micro_batches": 1},
    offload.Pipeline.of: lambda: {"schedule": SCHEDULE},
    offload.mark_module: lambda: {"module": nn.Linear(4, 4), "mark": None},
    offload.plan_pipeline: lambda: {
        "profile": planned().profile, "hardware": offload.Hardware.h200(),
        "pipeline": offload.Pipeline(1, 1),
    },
    offload.share_host: lambda: {"plan": planned(), "group": None},
    offload.share_decisions: lambda: {"plan": planned(), "group": None},
    distributed.clip_grad_norm_: lambda: {"parameters": with_grads(), "max_norm": 1.0},
    distributed.expert_placement: lambda: {"mesh": None},
    distributed.shard_placement: lambda: {"parameter": nn.Parameter(torch.ones(2))},
    distributed.overlap_pairs: lambda: {"schedule": None},
    distributed.quantized_gather: of_model(recipe=recipes.Float8BlockScaling()),
    kernels.kernel_op: lambda: {"twin": twin, "cases": lambda: ()},
    kernels.Space: lambda: {"name": f"mine {next(NUMBERS)}", "candidates": [{"BLOCK": 1}]},
    hf.to_fuseops: lambda: {"tensors": {}},
    hf.to_hf: lambda: {"tensors": {}},
    te.to_fuseops: lambda: {"tensors": {}},
    te.to_te: lambda: {"tensors": {}, "grouped": []},
    **dict.fromkeys([fo.Sequential.plan, fo.Sequential.explain], lambda: {"x": X}),
    **dict.fromkeys([fo.Sequential.forward, fo.MoE.forward], lambda: {"x": X}),
    fo.Sequential.add_module: lambda: {"name": "more", "module": nn.Linear(8, 8)},
    fo.Op.forward: lambda: {"args": (X,)},
    fo.Op.register_wgrad_accumulation_and_reduce_hooks: lambda: {"hook": print},
    fo.ops.InjectLoss.set_scale: lambda: {"scale": 2.0},
    fo.FusionPlan.diff: lambda: {"other": explained().plans[0]},
    graphs.Positional.forward: lambda: {"x": X},
    **{
        of: lambda: {"path": os.devnull} for of in (
            fo.Explanation.save_html, offload.OffloadPlan.save_html, offload.OffloadPlan.save_trace,
        )
    },
    offload.OffloadPlan.bytes_of: lambda: {"decision": "keep"},
    offload.Report.named: lambda: {"name": "0.input"},
    offload.Candidate.matches: lambda: {"glob": "**"},
    offload.Hardware.slower: lambda: {"factor": 2.0},
    offload.Hardware.with_link: lambda: {"rate": 2.0},
    offload.Hardware.copy_seconds: lambda: {"lane": "d2h", "nbytes": 1},
    offload.Hardware.coding_seconds: lambda: {"nbytes": 128, "codes": 66},
    offload.Hardware.network_seconds: lambda: {"nbytes": 1},
    offload.Hardware.op_seconds: lambda: {"flops": 1.0, "nbytes": 1, "dtype": "bfloat16"},
    **{
        of: lambda: {"layer": "0"} for of in (
            offload.Scheduler.offload_layer, offload.Scheduler.release_layer,
            offload.Scheduler.reload_layer,
        )
    },
    recipes.Scaling.nbytes: lambda: {"rows": 4, "k": 128},
}  # fmt: skip
"""What needs arguments, with some that it takes. Ops have theirs in the catalogue; what is in neither needs none."""


@functools.cache
def saved_by_hand() -> tuple[offload.Scheduler, torch.Tensor]:
    """A scheduler that is driven by hand, and the loss of a forward whose saved tensors are alive."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    scheduler = offload.Scheduler(
        model, layers="*", manual=True, policy=offload.Policy(min_bytes=0)
    )
    with scheduler:
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    return scheduler, loss


INSTANCES: dict[type, Callable[[], Any]] = {
    fo.Op: Scale,
    fo.Explanation: explained,
    fo.FusionPlan: lambda: explained().plans[0],
    offload.OffloadPlan: planned,
    offload.Report: lambda: offload.keep().report(),
    offload.Candidate: lambda: offload.Candidate("0.x", "Linear", (2,), torch.float32, 8),
    offload.Scheduler: lambda: saved_by_hand()[0],
    offload.Hardware: offload.Hardware.h200,
    fo.Sequential: mlp,
    fo.ops.Router: lambda: fo.ops.Router(8, 4, 2, expert_bias=True),
    recipes.Quantized: lambda: fo.quantize(torch.randn(4, 128), SCALING.input),
    graphs.Positional: lambda: graphs.Positional(mlp()),
}  # fmt: skip
"""Instances of the classes whose methods are called, where `base` has no arguments for one."""

NONSENSE: dict[str, Any] = {
    "none": None, "an object": object(), "a word": "wrong", "no word": "", "three": 3, "half": 2.5,
    "negative": -1, "nan": math.nan, "infinity": math.inf, "true": True, "complex": 1j,
    "a class": int, "bytes": b"x", "a list of None": [None], "an empty list": [], "a dict": {3: None},
    "four axes": torch.ones(2, 3, 4, 5), "bools": torch.tensor([True]), "a scalar": torch.tensor(1.5),
    "a module": nn.Linear(8, 8),
}  # fmt: skip


def base(made: Any) -> Given:
    """Arguments that it takes, those that it needs at least."""
    if made in BASES:
        return BASES[made]()
    if made not in exported():
        return {}
    op = entry(made).make(Wanted(lambda *of: of[0], 8, 8, 4, 2))
    kinds = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    given = signature(made).parameters.values()
    names = [p.name for p in given if p.default is p.empty and p.kind not in kinds]
    return {name: getattr(op, name, name) for name in names}


def hints(made: Any) -> dict[str, Any]:
    """The types of its parameters; Any where they cannot be read."""
    init = getattr(made, "__init__", None)
    for of in (
        (made, init) if not isinstance(made, type) or issubclass(made, tuple) else (init, made)
    ):
        with suppress(Exception):
            return typing.get_type_hints(of)
    return {}


def excludes(hint: Any, value: Any) -> bool:
    """Whether a type says that a value is not one of its own. One that does not tell excludes nothing."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return all(excludes(part, value) for part in inner)
    if origin is Literal:
        return not (isinstance(value, str) and value in inner)
    if origin is Any:
        return False
    if origin is float:
        return not (isinstance(value, torch.Tensor) or (isinstance(value, Real) and value == value))
    if origin is int:
        return not isinstance(value, Integral) or isinstance(value, bool)
    if origin is bool:
        return not isinstance(value, int)
    if origin is torch.device:  # of a number torch makes one
        return not isinstance(value, Integral | torch.device)
    if origin is Path:
        return not isinstance(value, Path)
    if origin is Callable or origin is collections.abc.Callable:
        return not callable(value)
    if origin in (tuple, list, Sequence, Iterable, Collection):
        if isinstance(value, str):  # one name, for several
            return excludes(inner[0], value)
        several = isinstance(value, Iterable) and not isinstance(value, bytes | torch.Tensor)
        return not several or (bool(inner) and any(excludes(inner[0], v) for v in value))
    if origin is Mapping:
        return not isinstance(value, Mapping) or any(
            excludes(i, v) for item in value.items() for i, v in zip(inner, item, strict=False)
        )
    return isinstance(origin, type) and origin is not object and not isinstance(value, origin)


def instance(owner: type) -> Any:
    """What a method is called of."""
    return INSTANCES[owner]() if owner in INSTANCES else owner(**base(owner))


def call(made: Any, name: str, value: Any) -> None:
    """Call with a value for one argument, as its users do: a scope is entered and left."""
    parameters, given = signature(made).parameters, base(made)
    kinds = {n: p.kind for n, p in parameters.items()}
    if kinds[name] is Parameter.VAR_POSITIONAL:
        given[name] = (value,)
    else:
        given["nonsense" if kinds[name] is Parameter.VAR_KEYWORD else name] = value
    several = next((n for n, kind in kinds.items() if kind is Parameter.VAR_POSITIONAL), None)
    first: list[Any] = []
    if several is not None:
        before = itertools.takewhile(lambda n: n != several, parameters)
        first = [*(given.pop(n) for n in before if n in given), *given.pop(several, ())]
    asked = getattr(instance(OWNERS[made]), made.__name__) if made in OWNERS else made
    result = asked(*first, **given)
    if made is kernels.kernel_op:
        result(launcher())
    if isinstance(result, AbstractContextManager) and not isinstance(result, offload.Scheduler):
        with result:
            pass


TORCHS = ("device", "dtype", "where")
"""Arguments that are passed on to torch's factories, which refuse what is none, as for torch's own modules."""

ALSO_TAKEN = {(fo.Rule, "when"): "one condition alone, a function"}
"""What takes more than its annotation, which is what it holds."""


def of_user_code(made: Any, name: str) -> bool:
    """Whether a model of the user's gets an argument, and says itself what it thinks of it."""
    given = signature(made).parameters
    return "model" in given and given[name].kind in (
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    )


def cells() -> Iterator[tuple[Any, str, Any]]:
    """(callable, one of its arguments, its type)."""
    for made in public():
        if made not in NOT_CALLED:
            types_of = hints(made)
            for name in signature(made).parameters:
                if not of_user_code(made, name):
                    yield made, name, types_of.get(name, Any)


CELLS = list(cells())


def state() -> Any:
    """What a refused call leaves as it was: settings, scopes, and what is registered or marked."""
    active = scopes.current()
    return (
        scopes.process.token, active.token, [*active.watchers], {*rule_module.NAMES},
        [*SPACES], [*KERNEL_OPS], marks.module_changes, torch.is_grad_enabled(),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Registries are as before a test, which registers what it may, and writes files where its path says."""
    monkeypatch.chdir(tmp_path)
    names, spaces, kernel_ops = {*rule_module.NAMES}, {**SPACES}, {**KERNEL_OPS}
    yield
    for registry, before in ((SPACES, spaces), (KERNEL_OPS, kernel_ops)):
        for added in registry.keys() - before.keys():
            del registry[added]
    rule_module.NAMES &= names


@pytest.mark.parametrize("made", public(), ids=public().values())
def test_every_public_callable_has_arguments_that_it_takes(made: Any) -> None:
    """Those that name what there is none of here (a mesh, a group, a file) are refused for that alone."""
    if made in NOT_CALLED:
        return
    given = signature(made).bind_partial(**{
        name: value for name, value in base(made).items()
        if signature(made).parameters[name].kind is not Parameter.VAR_POSITIONAL
    })  # fmt: skip
    needed = [
        name for name, p in signature(made).parameters.items()
        if p.default is p.empty and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]  # fmt: skip
    assert {*needed} <= {*given.arguments}, "give it some in BASES, or a reason in NOT_CALLED"


@pytest.mark.parametrize(
    ("made", "name", "hint"), CELLS, ids=[f"{public()[made]}-{name}" for made, name, _ in CELLS]
)
@pytest.mark.filterwarnings("ignore")
def test_nonsense_is_refused_by_the_name_of_its_argument(made: Any, name: str, hint: Any) -> None:
    """What the type excludes, always. What it does not may be taken, or refused as clearly: never by an error from
    inside, and neither leaves a trace.
    """
    variable = signature(made).parameters[name].kind in (
        Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    )  # fmt: skip
    for kind, value in NONSENSE.items():
        excluded = excludes(hint, value) and not ((made, name) in ALSO_TAKEN and callable(value))
        if not excluded and callable(value) and "Callable" in str(hint):
            continue  # a function of the user's: what it raises is its own
        before = state()
        try:
            call(made, name, value)
        except (fo.FuseOpsError, TypeError, ValueError, KeyError) as refused:
            ours = isinstance(refused, fo.FuseOpsError) and not excluded  # two may not fit
            named = [*signature(made).parameters, made.__name__] if ours else [name]
            text = str(refused)
            assert variable or re.search(rf"\b({'|'.join(named)})\b", text), f"{kind}: {text}"
            assert state() == before, kind
            shows_values = isinstance(refused, fo.FuseOpsError) and (
                "\n" in text or len(text) > 600
            )
            assert not shows_values, (
                f"{kind}: a message is one line, and a tensor its shape: {text}"
            )
        except RuntimeError:
            assert name in TORCHS, kind
        else:
            assert not excluded, f"{name}={value!r} is taken in silence"
