"""The tools of fuseops.testing see what they are for: each is shown a defect, and says where it is."""

from typing import Any, NamedTuple

import fresh
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_linear import NormLinear
from torch import Tensor, nn

import fuseops as fo
from fuseops.rules.fused.grouped_mlp import GroupedMLP
from fuseops.rules.fused.linear_act import LinearAct
from fuseops.testing import assert_bwd_is_vjp, assert_fused_matches_unfused, bisect
from fuseops.testing.catalogue import Wanted, entry
from fuseops.testing.compare import difference
from fuseops.testing.step import perturbed
from fuseops.testing.strategies import filled


class ScaleSaved(NamedTuple):
    x: Tensor | None
    gain: Tensor | None
    probs: Tensor | None


class Scale(fo.Op[ScaleSaved]):
    """y = x * gain * probs: right in every way; the ops below each break one thing."""

    reads = ("probs",)
    saves_for = {"x": ("gain", "probs"), "gain": ("x", "probs"), "probs": ("x", "gain")}

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def fwd(self, x: Tensor, *, gain: Tensor, probs: Tensor) -> fo.Out:
        return fo.Out(x * gain * probs[:, None], ScaleSaved(x, gain, probs))

    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        x, gain, probs = saved
        dx = dgain = dprobs = None
        if "x" in call.needs:
            dx = dy * gain * probs[:, None]  # type: ignore[operator, index]
        if "gain" in call.needs:
            dgain = (dy * x * probs[:, None]).sum(0)  # type: ignore[operator, index]
        if "probs" in call.needs:
            dprobs = (dy * x * gain).sum(-1)  # type: ignore[operator]
        return fo.Grads(dx, {"gain": dgain}, {"probs": dprobs})


class Wrong(Scale):
    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        grads = super().bwd(saved, dy, call=call)
        return grads if grads.x is None else grads._replace(x=grads.x * 1.0001)


class TooLittle(Scale):
    saves_for = {"x": ("gain", "probs"), "gain": ("x",), "probs": ("x", "gain")}

    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        return super().bwd(saved, dy, call=call)


class TooMuch(Scale):
    saves_for = {"x": ("gain", "probs"), "gain": ("x", "probs"), "probs": ("x", "gain", "probs")}

    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        return super().bwd(saved, dy, call=call)


class BackwardReadsSelf(Scale):
    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        return super().bwd(saved._replace(gain=self.gain.detach()), dy, call=call)


class ForwardReadsSelf(Scale):
    def fwd(self, x: Tensor, *, gain: Tensor, probs: Tensor) -> fo.Out:
        return super().fwd(x, gain=self.gain, probs=probs)


class WritesToDy(Scale):
    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        return super().bwd(saved, dy.mul_(1), call=call)


class WritesToInput(Scale):
    def fwd(self, x: Tensor, *, gain: Tensor, probs: Tensor) -> fo.Out:
        out = super().fwd(x, gain=gain, probs=probs)
        with torch.no_grad():
            probs.mul_(1)
        return out


class NotForAll(Scale):
    """Wrong for one subset of needs only."""

    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: Any) -> fo.Grads:
        grads = super().bwd(saved, dy, call=call)
        return grads._replace(x=None) if call.needs == {"x", "probs"} else grads


class Random(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class OtherSaved(Scale):
    def fwd(self, x: Tensor, *, gain: Tensor, probs: Tensor) -> fo.Out:
        return super().fwd(x, gain=gain, probs=probs)._replace(saved=(x, gain, probs))


X, PROBS = torch.randn(5, 4), torch.rand(5)


def test_a_right_op_passes() -> None:
    assert_bwd_is_vjp(Scale(), X, probs=PROBS)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_norm_whose_gradient_cancels_keeps_its_contract(width: int, seed: int) -> None:
    """Of one column, or with dy along x, what rounding leaves is all that there is to compare."""
    norm = entry(fo.ops.RMSNorm).make(Wanted(lambda *options: options[-1], width, width, 1))
    assert norm.weight is None
    assert_bwd_is_vjp(norm, filled((3, width), torch.float64, "normal", seed))


@pytest.mark.parametrize("width", [33, 65, 127])
@pytest.mark.parametrize("seed", range(3))
def test_a_norm_of_rows_without_variance_keeps_its_contract(width: int, seed: int) -> None:
    """What is left of x without its mean is rounding, which rstd makes 316 times as large."""
    torch.manual_seed(seed)
    rows = torch.randn(7, 1, dtype=torch.float64).expand(7, 2 * width).clone()
    assert_bwd_is_vjp(fo.ops.LayerNorm(width, bias=False), rows[:, ::2])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_softmax_that_has_become_a_maximum_keeps_its_contract(seed: int, rows: int) -> None:
    """It has no slope: autograd's `d - sum(d s)` is what rounding leaves, and needs no load."""
    torch.manual_seed(seed)
    router = fo.ops.Router(16, 4, top_k=2, balance_loss=0.5)
    assert_bwd_is_vjp(router, filled((rows, 16), torch.float32, "large", seed))


def test_a_load_that_is_even_is_read_all_the_same() -> None:
    """Then the balance loss has no slope, and the gradient that the z loss leaves is right without the load."""
    router = fo.ops.Router(4, 4, top_k=2, balance_loss=0.5, z_loss=0.25)
    with torch.no_grad():
        router.weight.copy_(4 * torch.eye(4))
    x = torch.tensor([[1.0, 0.9, 0.0, 0.0], [0.0, 0.0, 1.0, 0.9]])
    assert router(x)[1].tolist() == [[0, 1], [2, 3]]
    assert_bwd_is_vjp(router, x)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Wrong, r"Wrong\.bwd is wrong for needs \{x\}: gradient of x.*worst element \(\d, \d\)"),
        (TooLittle, r"saves_for keeps too little: for the gradient of gain bwd also reads 'probs'"),
        (TooMuch, r"saves_for\['probs'\] keeps too much: bwd does without 'probs'"),
        (BackwardReadsSelf, r"bwd reads a parameter from self, for the gradient of (x|probs)"),
        (ForwardReadsSelf, r"fwd reads a parameter from self: y changed"),
        (WritesToDy, r"WritesToDy\.bwd writes in place"),
        (WritesToInput, r"WritesToInput\.fwd writes in place to \[1\]\['probs'\]"),
        (NotForAll, r"NotForAll\.bwd is wrong for needs \{probs, x\}: .*gives None"),
        (Random, r"Random\.fwd is random"),
        (OtherSaved, r"fwd saves tuple, its class says ScaleSaved"),
    ],
)
def test_a_defect_of_an_op_is_found(op: type[fo.Op[Any]], message: str) -> None:
    side = {"probs": PROBS} if op.reads else {}
    with pytest.raises(AssertionError, match=message):
        assert_bwd_is_vjp(op(), X, **side)


def test_a_side_input_that_was_forgotten_is_named() -> None:
    with pytest.raises(TypeError, match=r"Scale reads \['probs'\]: pass \['probs'\]"):
        assert_bwd_is_vjp(Scale(), X)


@pytest.mark.parametrize("given", [nn.Linear(2, 2), fo.Sequential(fo.ops.SiLU()), 3, None])
def test_what_is_no_op_has_no_contract(given: Any) -> None:
    with pytest.raises(fo.FuseOpsError, match="expects an op of fuseops, got"):
        assert_bwd_is_vjp(given, X)


# --- fused against unfused


class LoudForward(LinearAct):
    def fwd(self, *args: Any) -> fo.Out:
        out = super().fwd(*args)
        return out._replace(y=out.y * 1.01)


class LostGradient(GroupedMLP):
    def bwd(self, *args: Any) -> tuple[fo.Grads, ...]:
        first, act, last = super().bwd(*args)
        return first, act._replace(side={"probs": torch.zeros(5)} if act.side else None), last


class Crashing(NormLinear):
    def fwd(self, *args: Any) -> fo.Out:
        raise RuntimeError("no kernel for this")


LOUD = fo.Rule("loud", (fo.ops.Linear, fo.ops.SiLU), LoudForward)
LOST = fo.Rule(
    "lost", (fo.ops.GroupedLinear, fo.ops.ScaledSwiGLU, fo.ops.GroupedLinear), LostGradient, "joint"
)
CRASHING = fo.Rule("crashing", (fo.ops.RMSNorm, fo.ops.Linear), Crashing)


class Block(nn.Module):
    """A model that is not a Sequential, with two of them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.mlp = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU(), nn.Dropout(0.5))
        self.experts = fo.Sequential(
            fo.ops.GroupedLinear(2, 4, 8, bias=False),
            fo.ops.ScaledSwiGLU(),
            fo.ops.GroupedLinear(2, 4, 4, bias=False),
        )

    def forward(self, x: Tensor, routing: fo.Routing) -> dict[str, Tensor]:
        x = self.mlp(self.norm(x))
        return {"hidden": x, "y": self.experts(x, routing)}


ROUTING = fo.Routing.from_counts([2, 3], probs=PROBS)


def test_a_right_model_passes_and_the_rules_are_returned() -> None:
    fired = assert_fused_matches_unfused(Block(), X, ROUTING)
    assert fired == ("linear_act", "act_linear", "grouped_mlp")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (LOUD, r"output\['hidden'\].*(?s:.*)loud on mlp\.0\.\.mlp\.1 \(forward\)"),
        (LOST, r"gradient of input 1\.probs.*(?s:.*)lost on experts\.0\.\.experts\.2 \(joint\)"),
    ],
)
def test_a_defect_of_a_rule_is_found_and_named(rule: fo.Rule, message: str) -> None:
    model = Block()
    fo.configure(model.mlp if rule is LOUD else model.experts, rules=[rule])
    with pytest.raises(AssertionError, match=message):
        assert_fused_matches_unfused(model, X, ROUTING)
    assert bisect(model, X, ROUTING) == rule.name


def test_bisect_of_a_right_model_is_none() -> None:
    assert bisect(Block(), X, ROUTING) is None


def test_bisect_names_a_rule_that_differs_only_beside_another() -> None:
    class Beside(LinearAct):
        """Wrong only where the rule before it fired too."""

        def fwd(self, x: Tensor, *args: Any) -> fo.Out:
            out = super().fwd(x, *args)
            return out._replace(y=out.y * 2) if log.pop() else out

    log: list[bool] = []

    class First(NormLinear):
        def fwd(self, *args: Any) -> fo.Out:
            log.append(True)
            return super().fwd(*args)

    rules = [
        fo.Rule("first", (fo.ops.RMSNorm, fo.ops.Linear), First),
        fo.Rule("beside", (fo.ops.Linear, fo.ops.GELU), Beside),
    ]
    linear = fo.ops.Linear
    model = fo.Sequential(fo.ops.RMSNorm(4), linear(4, 4), nn.Tanh(), linear(4, 4), fo.ops.GELU())
    log.extend([False] * 99)
    with fo.rules(*rules):
        assert bisect(model, X) in ("first", "beside")


def test_a_rule_that_raises_is_told_from_one_that_differs() -> None:
    model = fo.Sequential(fo.ops.RMSNorm(4), fo.ops.Linear(4, 4))
    with fo.rules(CRASHING), pytest.raises(AssertionError, match="fused raises RuntimeError"):
        assert_fused_matches_unfused(model, X)


def test_nothing_stays_behind() -> None:
    model, x = Block(), X.clone().requires_grad_()
    model.mlp[0].weight.grad = torch.full((4, 4), 7.0)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert_fused_matches_unfused(model, x, ROUTING)
    assert torch.equal(torch.get_rng_state(), before)
    for name, t in model.state_dict().items():
        assert torch.equal(t, state[name]), name
    assert model.mlp[0].weight.grad.eq(7).all() and x.grad is None
    assert all(p.grad is None for n, p in model.named_parameters() if n != "mlp.0.weight")
    assert "_settings" not in model.mlp.__dict__


def test_a_parameter_that_a_rule_writes_to_is_found() -> None:
    class Eager(LinearAct):
        def fwd(self, x: Tensor, t: Any, calls: Any) -> fo.Out:
            t[0]["weight"].data.mul_(1.5)
            return super().fwd(x, t, calls)

    model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())
    rule = fo.Rule("eager", (fo.ops.Linear, fo.ops.SiLU), Eager)
    with fo.rules(rule), pytest.raises(AssertionError, match=r"parameter 0\.weight"):
        assert_fused_matches_unfused(model, X)


# --- when two tensors are equal


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, float("inf")], [1.0, float("inf")], True),
        ([1.0, float("inf")], [1.0, -float("inf")], False),
        ([1.0, 3e38], [1.0, float("inf")], False),
        ([1.0, 0.0], [1.0, -0.0], True),
        ([1.0, 1e-9], [1.0, 0.0], True),
        ([1.0, 1e-3], [1.0, 0.0], False),
        ([], [], True),
    ],
)
def test_equality(a: list[float], b: list[float], equal: bool) -> None:
    assert (difference("t", torch.tensor(a), torch.tensor(b), 1e-6) is None) is equal


@pytest.mark.parametrize(
    "dtype",
    [torch.complex128, torch.complex64, torch.float64, torch.float32, torch.bfloat16, torch.int64],
    ids=str,
)
@given(at=st.integers(0, 5), conjugated=st.booleans(), part=st.sampled_from([1, 1j]))
def test_a_difference_in_any_part_of_any_element_is_one(
    dtype: torch.dtype, at: int, conjugated: bool, part: complex
) -> None:
    t = torch.arange(6).to(dtype).view(2, 3)
    t = t.conj() if conjugated else t
    other = t.clone()
    assert difference("t", other, t, 0.0) is None
    other.view(-1)[at] += part if dtype.is_complex else 1
    assert difference("t", other, t, 1e-3) is not None


class Turned(fo.Op[ScaleSaved]):
    """y = x * gain of complex numbers."""

    saves_for = {"x": ("gain",), "gain": ("x",)}
    dx: Any = staticmethod(lambda dy, gain: dy * gain.conj())

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def fwd(self, x: Tensor, *, gain: Tensor) -> fo.Out:
        return fo.Out(x * gain, ScaleSaved(x, gain, None))

    def bwd(self, saved: ScaleSaved, dy: Tensor) -> fo.Grads:
        x, gain, _ = saved
        dx = None if gain is None else self.dx(dy, gain)
        return fo.Grads(dx, {"gain": None if x is None else (dy * x.conj()).sum(0)})


class NotConjugated(Turned):
    dx = staticmethod(lambda dy, gain: dy * gain)


def test_an_op_of_complex_numbers_has_the_contract_of_any() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert_bwd_is_vjp(Turned(), x)
    with pytest.raises(AssertionError, match=r"bwd is wrong for needs \{x\}"):
        assert_bwd_is_vjp(NotConjugated(), x)


def test_none_shape_and_dtype_differ() -> None:
    t = torch.zeros(2, 3)
    for other in (None, t.t(), t.double()):
        assert difference("t", t, other, 1.0) is not None
    assert difference("t", None, None, 0.0) is None


def test_the_tools_work_without_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None; import torch, fuseops as fo\n"
        "model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())\n"
        "print(fo.testing.assert_fused_matches_unfused(model, torch.randn(3, 4)))\n"
        "fo.testing.assert_bwd_is_vjp(fo.ops.Linear(4, 4), torch.randn(3, 4))\n"
    )
    ran = fresh.run("-c", code)
    assert ran.returncode == 0 and "linear_act" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_last_place_is_shaken_in_every_dtype(dtype: torch.dtype) -> None:
    """What rounding explains is measured by it: where nothing moves, nothing is explained."""
    ones = torch.ones(64, dtype=dtype)
    with perturbed(module := torch.nn.LayerNorm(64, dtype=dtype), 0.0, torch.Generator()):
        moved = module.weight.detach().clone()
    assert (
        torch.equal(module.weight, ones)
        and 0 < (moved - ones).abs().max() <= 2 * torch.finfo(dtype).eps
    )
