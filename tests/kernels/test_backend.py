"""Ops over the kernels: models give what the reference gives, and `fo.reference()` keeps every kernel out."""

import pytest
import torch

import fuseops as fo
from fuseops.kernels.registry import watch_launches

pytestmark = pytest.mark.usefixtures("interpreted")
ops = fo.ops


def dense(dtype):
    return fo.Sequential(
        ops.RMSNorm(16, dtype=dtype),
        ops.Linear(16, 24, dtype=dtype),
        ops.SwiGLU(),
        ops.Bias(12, dtype=dtype),
        ops.GELU(),
        ops.Linear(12, 12, dtype=dtype),
    )


def experts(dtype):
    return fo.Sequential(
        ops.GroupedLinear(3, 16, 24, dtype=dtype),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 12, 16, dtype=dtype),
    )


def joint(dtype):
    return fo.Sequential(
        ops.GroupedLinear(3, 16, 24, bias=False, dtype=dtype),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 12, 16, bias=False, dtype=dtype),
    )


DENSE = {"rmsnorm_fwd", "rmsnorm_bwd", "act_fwd", "act_bwd", "bias_fwd", "bias_bwd", "act_bwd_bias"}
GROUPED = {"grouped_mm", "grouped_wgrad", "group_tiles"}
JOINT = GROUPED | {"scaled_act_fwd", "scaled_act_bwd"}
EXPERTS = JOINT | {"grouped_bias_bwd"}  # the bias is added inside the GEMM
MODELS = [(dense, DENSE), (experts, EXPERTS), (joint, JOINT)]


def inputs(make, dtype):
    x = torch.randn(7, 16, dtype=dtype, requires_grad=True)
    if make is dense:
        return x, ()
    probs = torch.rand(7, requires_grad=True)
    return x, (fo.Routing.from_counts(torch.tensor([2, 0, 4]), probs),)


def gradients(model, x, side, owner=None):
    leaves = [x, *(t for t in (side[0] if side else ()) if t is not None and t.requires_grad)]
    leaves += (owner or model).parameters()
    y = model(x, *side)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) / 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "kernels"), MODELS)
def test_a_model_launches_its_kernels_and_equals_the_reference(make, kernels, dtype):
    model, (x, side) = make(dtype), inputs(make, dtype)
    with watch_launches() as launched:
        ours = gradients(model, x, side)
    assert {op.name for op, *_ in launched} == kernels
    with fo.reference(), watch_launches() as launched:
        theirs = gradients(model, x, side)
    assert not launched
    tol = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert (a - b).float().norm() <= tol * b.float().norm().clamp_min(1e-3)


@pytest.mark.parametrize(("make", "kernels"), MODELS)
def test_explain_says_which_kernels_a_forward_does_without(make, kernels):
    def found(dtype):
        model, (x, side) = make(dtype), inputs(make, dtype)
        said = [
            note.partition(" runs as plain torch instead of ")
            for note in model.plan(x, *side).notes
        ]
        names = [kernels.removesuffix(": float64") for _, _, kernels in said if kernels]
        return {name for several in names for name in several.split(", ")}

    model, (x, side) = make(torch.float32), inputs(make, torch.float32)
    with watch_launches() as launched:
        model(x, *side)
    assert found(torch.float64) == {op.name for op, *_ in launched} - {"group_tiles"}
    assert found(torch.float32) == found(torch.bfloat16) == set()
    with fo.reference():
        assert found(torch.float64) == set()


WHO = {"x", "weight", "bias", "probs"}


@pytest.mark.parametrize(
    "frozen", [set(), {"x"}, {"weight"}, {"bias", "probs"}, {"x", "weight"}, WHO]
)
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_frozen_launches_nothing_and_saves_nothing(frozen, packed):
    op = ops.GroupedLinear(3, 16, 24, scale_bias=True, packed=packed)
    x, probs = torch.randn(7, 16), torch.rand(7)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    x.requires_grad_("x" not in frozen), probs.requires_grad_("probs" not in frozen)
    for name, p in op.named_parameters():
        p.requires_grad_(name.rstrip("012") not in frozen)
    saved = []
    with (
        watch_launches() as launched,
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        y = op(x, offs=offs, probs=probs)
        forward = len(launched)
        if y.requires_grad:
            y.sum().backward()
    wanted = {
        "grouped_mm": {"x"}, "grouped_wgrad": {"weight"}, "grouped_bias_bwd": {"bias", "probs"}
    }  # fmt: skip
    names = [op.name for op, *_ in launched[forward:]]
    assert names == [name for name in names if wanted[name] - frozen]  # nothing for what is frozen
    assert set(names) == {name for name, needs in wanted.items() if needs - frozen}
    own = {t.data_ptr() for t in saved}
    assert (x.data_ptr() in own) == ("weight" not in frozen)
    assert (op.weight.data_ptr() in own) == ("x" not in frozen)
    assert (op.bias.data_ptr() in own) == ("probs" not in frozen)
    assert bool(saved) == y.requires_grad


def test_fp8_launches_the_quantize_kernel():
    model, x = fo.Sequential(ops.Linear(16, 16)), torch.randn(5, 16, requires_grad=True)
    with fo.recipe(fo.recipes.Float8CurrentScaling()), watch_launches() as launched:
        y = model(x)
        y.backward(torch.ones_like(y))
    names = [op.name for op, *_ in launched if op.name.startswith("quantize")]
    # x in both layouts, rows of the weight; dy in both layouts, columns of the weight
    assert names == ["quantize_groups", "quantize_matrices"] * 2
    with torch.no_grad():
        high = model(x)
    assert (y - high).norm() < 0.1 * high.norm()


@pytest.mark.parametrize("grad", [True, False])
def test_the_reference_is_plain_torch_without_gradients_too(grad):
    model, x = dense(torch.float32), torch.randn(4, 16)
    with fo.reference(), watch_launches() as launched, torch.set_grad_enabled(grad):
        model(x)
    assert not launched
    with watch_launches() as launched, torch.set_grad_enabled(grad):
        model(x)
    assert launched


def test_the_reference_differentiates_twice_and_under_torch_func():
    model, x = dense(torch.float32), torch.randn(4, 16, requires_grad=True)
    with fo.reference():
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
        jac = torch.func.grad(lambda x: model(x).square().sum())(x.detach())
    assert torch.allclose(jac, dx, rtol=1e-4, atol=1e-6) and second.abs().sum() > 0


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("make", [dense, experts, joint])
def test_compiled_equals_eager(make, reference):
    torch.compiler.reset()
    model, (x, side) = make(torch.float32), inputs(make, torch.float32)
    eager = gradients(model, x, side)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with watch_launches() as launched:
        if reference:
            with fo.reference():
                got = gradients(compiled, x, side, model)
        else:
            got = gradients(compiled, x, side, model)
    # A registered op builds its tile table itself; nothing else goes past the graph.
    assert {op.name for op, *_ in launched} <= {"group_tiles"}
    for a, b in zip(got, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_float64_is_the_references():
    model, x = dense(torch.float64), torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    with watch_launches() as launched:
        assert torch.autograd.gradcheck(model, (x,))
    assert not launched
