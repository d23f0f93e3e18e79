"""Ops that share a name with a torch module are that module: constructor, state_dict, values, gradients."""

import copy
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fuseops as fo
from fuseops.ops.op import Op
from fuseops.testing.catalogue import exported
from fuseops.testing.compare import difference, tolerance
from fuseops.testing.step import training_step
from fuseops.testing.strategies import KINDS, NONFINITE, Case, dtypes, op_cases

# the gate of GLU is the first half, as of all its family and of te.ops; of nn.GLU it is the second
TWINS = [
    (op, getattr(nn, op.__name__))
    for op in exported()
    if hasattr(nn, op.__name__) and op is not fo.ops.GLU
]
NORMS = (fo.ops.RMSNorm, fo.ops.LayerNorm)
every_twin = pytest.mark.parametrize(("op", "module"), TWINS, ids=[op.__name__ for op, _ in TWINS])


def test_there_are_twins() -> None:
    assert {op.__name__ for op, _ in TWINS} >= {"Linear", "RMSNorm", "GELU", "SiLU", "Dropout"}


@every_twin
def test_the_constructor_is_torchs(op: type[Op[Any]], module: type[nn.Module]) -> None:
    def shape(cls: type) -> list[Any]:
        parameters = list(inspect.signature(cls).parameters.values())
        return [(p.name, p.default, p.kind) for p in parameters]

    mine, theirs = shape(op), shape(module)
    assert mine[: len(theirs)] == theirs
    more = [kind for _, _, kind in mine[len(theirs) :]]  # te.ops' zero_centered_gamma
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for kind in more)
    assert issubclass(op, module)


def twin(op: Op[Any], module: type[nn.Module]) -> nn.Module:
    """The torch module with the same settings and parameters."""
    names = [p for p in inspect.signature(module).parameters if p in vars(op) and p != "bias"]
    options = {name: getattr(op, name) for name in names}
    if "bias" in inspect.signature(module).parameters:
        options["bias"] = op.bias is not None
    made = module(**options).train(op.training)
    if getattr(op, "zero_centered_gamma", False) and op.weight is not None:
        one_more = op.weight.detach() + 1
        op.weight.data = one_more - 1  # so that the sum is exact
        made.weight.data = one_more
        made.load_state_dict({k: t for k, t in op.state_dict().items() if k != "weight"}, False)
    else:
        made.load_state_dict(op.state_dict())
    dtype = next((p.dtype for p in op.parameters()), torch.float32)
    return made.to(dtype)


def steps(case: Case, module: type[nn.Module]) -> tuple[Any, Any]:
    other = twin(case.model, module)
    mine, theirs = (
        training_step(m, (case.x,), case.side, all_inputs=True) for m in (case.model, other)
    )
    return mine, theirs


@every_twin
@given(data=st.data())
def test_values_and_gradients_are_torchs(
    op: type[Op[Any]], module: type[nn.Module], data: st.DataObject
) -> None:
    dtype = data.draw(dtypes())
    # A large value in one place of a row cancels in the gradient of a norm: only wide types hold it.
    wide = dtype in (torch.float32, torch.float64) and op not in NORMS
    # and the variance of equal numbers is what rounding left of them, which a LayerNorm divides by
    soft = ["normal", "zeros", *["constant"] * (op is not fo.ops.LayerNorm)]
    case = data.draw(op_cases(op, dtype, KINDS if wide else soft))
    mine, theirs = steps(case, module)
    if isinstance(case.model, fo.ops.Dropout) and not case.model.alias:
        return  # other random numbers; see test_dropout_keeps_the_share_that_torch_keeps
    tol = tolerance([case.x]) * 4  # torch rounds a product of the backward once more
    for got, expected in zip(mine[:2], theirs[:2], strict=True):
        for name in expected:
            found = difference(name, got[name], expected[name], tol, ("ours", "torch's"))
            if found is not None and found.worst >= tol:
                # what cancels is rounding in both: ours is no further from the truth then
                true = in_float64(case)[name]
                assert off(got[name], true) <= off(expected[name], true), found


def in_float64(case: Case) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(case.model).double()
    side = {k: t.double() if t.is_floating_point() else t for k, t in case.side.items()}
    step = training_step(model, (case.x.double(),), side, all_inputs=True)
    return {**step.outputs, **step.grads}


def off(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).abs().max())


@every_twin
@given(data=st.data())
def test_nan_and_infinities_are_where_torchs_are(
    op: type[Op[Any]], module: type[nn.Module], data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, torch.float32, NONFINITE))
    if isinstance(case.model, fo.ops.Dropout) and not case.model.alias:
        return
    mine, theirs = (step.outputs["output"] for step in steps(case, module))
    if isinstance(case.model, fo.ops.GELU) and case.model.approximate == "none":
        # torch's own gives inf there in float64, but NaN in float32 on the CPU
        theirs = torch.where(case.x == torch.inf, torch.inf, theirs)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_dropout_keeps_the_share_that_torch_keeps(p: float) -> None:
    x = torch.ones(100, 1000, requires_grad=True)
    y = fo.ops.Dropout(p)(x)
    y.sum().backward()
    kept = y.detach() != 0
    # The standard deviation of the share is at most 0.5 / sqrt(100 000) = 0.0016.
    assert abs(kept.double().mean().item() - (1 - p)) < 0.01
    assert torch.equal(y.detach()[kept], torch.full_like(y[kept], 1 / (1 - p) if p < 1 else 0.0))
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert p in (0.0, 1.0) or not torch.equal(fo.ops.Dropout(p)(x), y)


def test_glu_is_torchs_with_its_halves_swapped() -> None:
    x = torch.randn(3, 8)
    assert torch.allclose(fo.ops.GLU()(x), nn.GLU()(x.roll(4, -1)))
    assert not issubclass(fo.ops.GLU, nn.GLU)
    with pytest.raises(TypeError):
        fo.ops.GLU(-1)  # type: ignore[misc]


@every_twin
def test_inplace_variants_are_refused(op: type[Op[Any]], module: type[nn.Module]) -> None:
    if "inplace" in inspect.signature(module).parameters:
        with pytest.raises(fo.FuseOpsError, match="inplace"):
            op(inplace=True)


def test_initial_parameters_are_torchs() -> None:
    for ours, theirs in ((fo.ops.Linear, nn.Linear), (fo.ops.RMSNorm, nn.RMSNorm)):
        torch.manual_seed(3)
        mine = ours(*(5, 7)[: 2 if ours is fo.ops.Linear else 1])
        torch.manual_seed(3)
        other = theirs(*(5, 7)[: 2 if ours is fo.ops.Linear else 1])
        assert list(mine.state_dict()) == list(other.state_dict())
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    products = (
        fo.ops.Linear(16, 64),
        fo.ops.GroupedLinear(3, 16, 64),
        fo.ops.GroupedLinear(3, 16, 64, packed=False),
        fo.ops.Router(16, 64, 2, bias=True),
        fo.ops.LinearCrossEntropy(16, 64, bias=True),
    )
    for op, p in [(made, p) for made in products for p in (made.weight, made.bias)]:
        # of 64 draws and more some are near either end
        found, bound = p.detach().flatten(), 16**-0.5
        assert found.abs().max() <= bound, op
        assert found.min() < -0.75 * bound and found.max() > 0.75 * bound, op


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_default_epsilon_of_a_norm_is_torchs(dtype: torch.dtype) -> None:
    # Found: with the epsilon of bfloat16 itself, small activations lost their scale.
    x = 1e-3 * torch.randn(7, 16, dtype=dtype)
    ours, theirs = fo.ops.RMSNorm(16, dtype=dtype)(x), nn.RMSNorm(16, dtype=dtype)(x)
    assert difference("y", ours, theirs, tolerance([x]), ("ours", "torch's")) is None


def test_dropout_of_everything_is_differentiable_as_plain_torch() -> None:
    # Found: fwd returned zeros that autograd did not connect to x.
    x = torch.randn(3, 4, requires_grad=True)
    with fo.reference():
        (dx,) = torch.autograd.grad(fo.ops.Dropout(1.0)(x).sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 4), (0, 3, 4)])
def test_linear_takes_no_rows_of_any_rank(shape: tuple[int, ...]) -> None:
    # Found: the gradient of x asked torch to infer an axis of a tensor without elements.
    linear, x = fo.ops.Linear(4, 6), torch.randn(shape, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert linear.weight.grad is not None and not linear.weight.grad.any()


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [(fo.ops.ConstantScale(2.0), "scale", 3.0), (fo.ops.Dropout(0.5), "p", 0.25)],
)
def test_a_late_backward_is_that_of_its_forward(op: Op[Any], name: str, value: float) -> None:
    x = torch.ones(64, requires_grad=True)
    y = op(x)
    setattr(op, name, value)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())


@pytest.mark.parametrize("wide", ["x", "side"])
def test_add_gives_each_operand_a_gradient_in_its_own_dtype(wide: str) -> None:
    # Found: inside a node the op before the Add got a float32 gradient for its bfloat16 output.
    half, full = torch.bfloat16, torch.float32
    own, other = (full, half) if wide == "x" else (half, full)
    model = fo.Sequential(fo.ops.Linear(4, 4, dtype=own), fo.ops.Add("side"))
    x = torch.randn(3, 4, dtype=own, requires_grad=True)
    side = torch.randn(3, 4, dtype=other, requires_grad=True)
    y = model(x, side=side)
    assert y.dtype is full
    y.sum().backward()
    assert model[0].weight.grad.dtype is own
    assert side.grad is not None and side.grad.dtype is other


class PublishSaved(NamedTuple):
    pass


class Publish(fo.Op[PublishSaved]):
    """y = 2x, and x is published in bfloat16. Notes the dtype of the gradient of that."""

    writes = ("half",)
    saves_for = {"x": ()}
    seen: list[torch.dtype] = []

    def fwd(self, x: torch.Tensor) -> fo.Out:
        return fo.Out(2 * x, PublishSaved(), {"half": x.to(torch.bfloat16)})

    def bwd(self, saved: Any, dy: torch.Tensor, *, dside: dict[str, Any]) -> fo.Grads:
        self.seen.append(dside["half"].dtype)
        return fo.Grads(2 * dy + dside["half"].float())


def test_a_published_tensor_gets_a_gradient_in_its_own_dtype() -> None:
    # The reader is in the same node as the writer: autograd does not cast between them.
    x = torch.randn(3, 4, requires_grad=True)
    fo.Sequential(Publish(), fo.ops.Add("half"))(x).sum().backward()
    assert Publish.seen == [torch.bfloat16]
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 4), 3.0))


@pytest.mark.parametrize("leading", [(), (1,), (1, 1)])
def test_angles_of_a_whole_batch_may_have_leading_ones(leading: tuple[int, ...]) -> None:
    """As torch broadcasts, and transformers makes them: (1, T, P)."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(*leading, 5, 4, dtype=torch.float64) for _ in range(2))
    leaves = [x, cos.requires_grad_(), sin.requires_grad_()]
    got = fo.ops.RoPE()(x, cos=cos, sin=sin)
    a, b = x.chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    want = torch.cat((a * c - b * s, b * c + a * s), -1)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(got)
    mine, theirs = (torch.autograd.grad(y, leaves, dy) for y in (got, want))
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_angles_of_integers_are_refused() -> None:
    """A rotation by a cosine that was cut to 0 is no error that a loss would show."""
    x, angles = torch.randn(5, 4, 8), torch.ones(5, 4)
    for cos, sin in ((angles.long(), angles), (angles, angles.int())):
        with pytest.raises(fo.FuseOpsError, match="RoPE expects cos and sin of float dtypes"):
            fo.ops.RoPE()(x, cos=cos, sin=sin)
