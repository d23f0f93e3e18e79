"""The cases of TransformerEngine's own tests of its fusible ops, written anew: their shapes, options and tolerances.

References are plain torch in float64 on numbers in [0, 1) that the dtype under test holds, as theirs are.
"""

import copy
import io
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import ops
from fuseops.ops.op import Call, FusedOp, Grads, Out
from fuseops.testing import assert_fused_matches_unfused

Tensors = Mapping[str, Tensor]
Reference = Callable[..., Any]
TOLERANCES = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}  # rtol; atol 1e-5
DTYPES = list(TOLERANCES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SEEDS = itertools.count(1)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) that the dtype holds."""
    source = torch.Generator().manual_seed(next(SEEDS) % 1000)
    return torch.rand(shape, generator=source).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, name: str = "y") -> None:
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=TOLERANCES[dtype], atol=1e-5,
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


def agree(module: nn.Module, reference: Reference, x: Tensor, **side: Tensor) -> None:
    """y and the gradients of x, of every parameter and of every float side input are those of float64.

    reference(x, p, **side): p are the parameters by name.
    """
    for p in module.parameters():
        p.data = drawn(*p.shape, dtype=p.dtype)
    floats = {n: t.requires_grad_() for n, t in side.items() if t.is_floating_point()}
    leaves = {"x": x.requires_grad_(), **dict(module.named_parameters()), **floats}
    y = module(x, **side)
    assert y.dtype is x.dtype
    dy = drawn(*y.shape, dtype=y.dtype)
    found = torch.autograd.grad(y, [*leaves.values()], dy)
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    rest = {n: wide.get(n, t) for n, t in side.items()}
    expected = reference(wide["x"], wide, **rest)
    close(y, expected, x.dtype)
    wanted = torch.autograd.grad(expected, [*wide.values()], dy.double())
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert got.dtype is leaves[name].dtype
        close(got, want, x.dtype, f"gradient of {name}")


# --- ops without a choice


@every_dtype
def test_identity_and_reshape_are_exact(dtype: torch.dtype) -> None:
    x = drawn(3, 5, 8, dtype=dtype).requires_grad_()
    for op, shape in ((ops.Identity(), (3, 5, 8)), (ops.Reshape(-1, 4), (30, 4))):
        y = op(x)
        dy = drawn(*shape, dtype=dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(y, x.reshape(shape)) and torch.equal(dx, dy.reshape(x.shape))


@every_dtype
@pytest.mark.parametrize("scale", [0.0, 1.0, -2.5, 3.5])
def test_constant_scale(scale: float, dtype: torch.dtype) -> None:
    agree(ops.ConstantScale(scale), lambda x, p: x * scale, drawn(5, 7, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (2, 4, 3), (13, 37)])
def test_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agree(ops.Bias(shape[-1], dtype=dtype), lambda x, p: x + p["bias"], drawn(*shape, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("tokens", [(7,), (1,), (2, 5), (4, 2, 3)])
@pytest.mark.parametrize("weight", [(64, 32), (3, 5), (128, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    weight: tuple[int, int], tokens: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    n, k = weight
    op = ops.Linear(k, n, bias=bias, dtype=dtype)
    x = drawn(*tokens, k, dtype=dtype)
    agree(op, lambda x, p: F.linear(x, p["weight"], p.get("bias")), x)


@every_dtype
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_weight_gradient_goes_to_main_grad(overwrite: bool, dtype: torch.dtype) -> None:
    op = ops.Linear(32, 64, bias=False, dtype=dtype)
    op.accumulate_into_main_grad = True
    weight: Any = op.weight
    weight.data = drawn(64, 32, dtype=dtype)
    weight.main_grad = torch.full((64, 32), math.nan if overwrite else 0.5)
    weight.overwrite_main_grad = overwrite
    x, dy = drawn(7, 32, dtype=dtype), drawn(7, 64, dtype=dtype)
    op(x).backward(dy)
    close(weight.main_grad, dy.double().T @ x.double() + (0 if overwrite else 0.5), dtype)
    assert weight.grad is None


@every_dtype
@pytest.mark.parametrize("shape", [(19, 64), (3, 5, 32), (4, 2, 6)])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
def test_norms(kind: str, centered: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, plus = shape[-1], float(centered)

    def layer(x: Tensor, p: Tensors) -> Tensor:
        return F.layer_norm(x, (n,), p["weight"] + plus, p["bias"], 1e-5)

    def rms(x: Tensor, p: Tensors) -> Tensor:
        return F.rms_norm(x, (n,), p["weight"] + plus, 1e-5)

    x = drawn(*shape, dtype=dtype)
    if kind == "l2":
        agree(ops.L2Norm(1e-6), lambda x, p: x / (x.square().sum(-1, True) + 1e-6).sqrt(), x)
        return
    norm = ops.LayerNorm if kind == "layer" else ops.RMSNorm
    op: nn.Module = norm(n, eps=1e-5, dtype=dtype, zero_centered_gamma=centered)
    agree(op, layer if kind == "layer" else rms, x)


@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm])
def test_a_norm_begins_as_the_identity_of_what_is_normed(norm: Any) -> None:
    x = drawn(5, 16)
    assert torch.equal(norm(16, zero_centered_gamma=True)(x), norm(16)(x))
    assert not norm(16, zero_centered_gamma=True).weight.any()


def test_a_norm_under_autocast_keeps_the_dtype_of_x() -> None:
    x = drawn(5, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.LayerNorm(16)(x).dtype is torch.bfloat16


@every_dtype
@pytest.mark.parametrize("p", [0.0625, 0.5, 0.75])
def test_dropout_keeps_by_chance(p: float, dtype: torch.dtype) -> None:
    """z of the number that is kept: 99 % of all draws lie within 2.5758."""
    torch.manual_seed(1234)
    x = (drawn(64, 64, dtype=dtype) + 1).requires_grad_()
    op = ops.Dropout(p)
    y = op(x)
    dy = drawn(64, 64, dtype=dtype) + 1
    (dx,) = torch.autograd.grad(y, x, dy)
    kept = y != 0
    close(y, torch.where(kept, x.double() / (1 - p), 0), dtype)
    close(dx, torch.where(kept, dy.double() / (1 - p), 0), dtype)
    n = kept.numel()
    assert abs(kept.sum().item() - n * (1 - p)) / math.sqrt(n * p * (1 - p)) < 2.5758
    assert torch.equal(op.eval()(x), x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_the_mask_of_dropout(reentrant: bool) -> None:
    model = fo.Sequential(ops.Linear(16, 16), ops.Dropout(0.5), ops.SiLU())
    x = drawn(64, 16).requires_grad_()
    found = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(7)
        x.grad, y = None, call(x)
        y.sum().backward()
        found.append((y, x.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# --- activations


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gated(act: Callable[[Tensor], Tensor]) -> Reference:
    return lambda x, p: act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def clamped(limit: float, offset: float) -> Reference:
    """At a limit itself the gradient passes, as of torch's clamp before 2.15, whose gives none there."""

    def call(x: Tensor, p: Tensors) -> Tensor:
        gate, up = x.chunk(2, -1)
        h = gate.where(gate <= limit, limit)
        return (
            h * torch.sigmoid(1.702 * h) * (up.where(up.abs() <= limit, up.sign() * limit) + offset)
        )

    return call


def situ(beta1: float, beta2: float) -> Reference:
    def call(x: Tensor, p: Tensors) -> Tensor:
        gate, up = x.chunk(2, -1)
        bounded = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate)
        return bounded * beta2 * torch.tanh(up / beta2)

    return call


def by_element(act: Callable[[Tensor], Tensor]) -> Reference:
    return lambda x, p: act(x)


ACTIVATIONS: dict[str, tuple[Callable[[], Any], Reference]] = {
    "gelu": (lambda: ops.GELU("tanh"), by_element(tanh_gelu)),
    "qgelu": (ops.QGELU, by_element(quick_gelu)),
    "relu": (ops.ReLU, by_element(F.relu)),
    "srelu": (ops.SReLU, by_element(squared)),
    "silu": (ops.SiLU, by_element(F.silu)),
    "glu": (ops.GLU, gated(torch.sigmoid)),
    "geglu": (lambda: ops.GEGLU("tanh"), gated(tanh_gelu)),
    "qgeglu": (ops.QGEGLU, gated(quick_gelu)),
    "reglu": (ops.ReGLU, gated(F.relu)),
    "sreglu": (ops.SReGLU, gated(squared)),
    "swiglu": (ops.SwiGLU, gated(F.silu)),
    "situglu": (ops.SiTUGLU, situ(4.0, 25.0)),
    "situglu, other betas": (lambda: ops.SiTUGLU(0.5, 0.75), situ(0.5, 0.75)),
    "clamped": (lambda: ops.ClampedSwiGLU(0.75), clamped(0.75, 1.0)),
    "clamped, no offset": (lambda: ops.ClampedSwiGLU(0.75, offset=0.0), clamped(0.75, 0.0)),
}
SCALED: dict[str, tuple[Callable[..., Any], Reference]] = {
    "swiglu": (ops.ScaledSwiGLU, gated(F.silu)),
    "situglu": (ops.ScaledSiTUGLU, situ(4.0, 25.0)),
    "clamped qgeglu": (ops.ScaledClampedSwiGLU, clamped(7.0, 1.0)),
    "srelu": (ops.ScaledSReLU, by_element(squared)),
}


@every_dtype
@pytest.mark.parametrize("shape", [(37,), (2, 13), (4, 1, 16)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    make, reference = ACTIVATIONS[name]
    wide = 1 + ("glu" in name or "clamped" in name)
    agree(make(), reference, 4 * drawn(*shape[:-1], wide * shape[-1], dtype=dtype) - 2)


@every_dtype
@pytest.mark.parametrize("shape", [(71, 192), (5, 7, 128)])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    make, reference = SCALED[name]
    x, probs = 4 * drawn(*shape, dtype=dtype) - 2, drawn(*shape[:-1])
    scaled = lambda x, p, probs: reference(x, p) * probs.unsqueeze(-1)  # noqa: E731
    agree(make(), scaled, x, probs=probs)


def blocks_to_halves(x: Tensor, block: int) -> Tensor:
    return x.unflatten(-1, (-1, 2, block)).transpose(-2, -3).flatten(-3)


@every_dtype
@pytest.mark.parametrize("name", ["swiglu", "situglu", "clamped"])
def test_interleaved_gates(name: str, dtype: torch.dtype) -> None:
    op = {"swiglu": ops.SwiGLU, "situglu": ops.SiTUGLU, "clamped": ops.ClampedSwiGLU}[name]
    reference = {**ACTIVATIONS, "clamped": (op, clamped(7.0, 1.0))}[name][1]
    for scaled in (False, True):
        x = 4 * drawn(19, 192, dtype=dtype) - 2
        if scaled:
            many: Any = getattr(ops, f"Scaled{op.__name__}")
            agree(
                many(interleave=32),
                lambda x, p, probs: reference(blocks_to_halves(x, 32), p) * probs[:, None],
                x,
                probs=drawn(19),
            )
        else:
            agree(op(interleave=32), lambda x, p: reference(blocks_to_halves(x, 32), p), x)


@pytest.mark.parametrize("betas", [(0.0, 25.0), (4.0, -1.0), (math.inf, 25.0), (4.0, math.nan)])
@pytest.mark.parametrize("op", [ops.SiTUGLU, ops.ScaledSiTUGLU])
def test_betas_are_finite_and_positive(op: Any, betas: tuple[float, float]) -> None:
    with pytest.raises(fo.FuseOpsError, match=r"beta[12] is .*, expected a finite number above 0"):
        op(*betas)


# --- grouped linear


SPLITS = (128, 0, 384, 256)


def by_group(x: Tensor, p: Tensors, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    rows, ends = [], [0, *offs.tolist()]
    for e, (start, stop) in enumerate(itertools.pairwise(ends)):
        y = x[start:stop] @ p["weight"][e].T
        if "bias" in p:
            scale = 1.0 if probs is None else probs[start:stop, None]
            y = y + p["bias"][e] * scale
        rows.append(y)
    return torch.cat(rows)


@every_dtype
@pytest.mark.parametrize("bias", ["none", "plain", "scaled"])
def test_grouped_linear(bias: str, dtype: torch.dtype) -> None:
    splits = torch.tensor(SPLITS, dtype=torch.int32)
    op = ops.GroupedLinear(4, 16, 24, bias=bias != "none", scale_bias=bias == "scaled", dtype=dtype)
    side = {"offs": splits.cumsum(0, dtype=torch.int32)}
    if bias == "scaled":
        side["probs"] = drawn(768)
    agree(op, by_group, drawn(768, 16, dtype=dtype), **side)


def test_grouped_linear_writes_where_it_is_told() -> None:
    op = ops.GroupedLinear(2, 8, 4, bias=False)
    x = drawn(6, 8).requires_grad_()
    offs = torch.tensor([2, 6], dtype=torch.int32)
    buffers = {"y": torch.full((6, 4), math.nan), "dx": torch.full((6, 8), math.nan)}
    y = op(x, offs=offs, out=buffers)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.data_ptr() == buffers["y"].data_ptr() and dx.data_ptr() == buffers["dx"].data_ptr()
    other = op(x, offs=offs)
    assert torch.equal(y, other) and torch.equal(dx, torch.autograd.grad(other.sum(), x)[0])


# --- sequences, channels and dtypes


def test_a_sequence_is_its_modules() -> None:
    """Ops and plain modules, in any number of runs, built as nn.Sequential is."""
    modules = [
        *(ops.Linear(8, 8), ops.SiLU(), nn.Tanh(), ops.Bias(8), nn.Linear(8, 8), ops.RMSNorm(8)),
        *(nn.Identity(), ops.Linear(8, 4), nn.ReLU()),
    ]
    model, x = fo.Sequential(*modules), drawn(5, 8)
    plain = x
    for module in modules:
        plain = module(plain)
    torch.testing.assert_close(model(x), plain)
    assert [*model] == modules and len(model) == 9 and model[2] is modules[2]
    assert model.state_dict().keys() == nn.Sequential(*modules).state_dict().keys()


@every_dtype
@pytest.mark.parametrize("asked", [True, False])
def test_a_channel_fans_out(asked: bool, dtype: torch.dtype) -> None:
    """Published once, added twice: the gradient is of all three ways, and of what the caller asked for."""
    x, dy, route = (drawn(4, 6, dtype=dtype) for _ in range(3))
    x.requires_grad_()
    model = fo.Sequential(ops.Tap("r"), ops.Add("r"), ops.Add("r"))
    if asked:
        y, r = model(x, returns=("r",))
        (dx,) = torch.autograd.grad([y, r], x, [dy, route])
        close(dx, 3 * dy.double() + route.double(), dtype)
    else:
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        close(dx, 3 * dy.double(), dtype)
    close(y, 3 * x.double(), dtype)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([ops.Add("r"), ops.Tap("r")], "after it was read"),
        ([ops.Tap("r"), ops.Tap("r"), ops.Add("r")], "written twice"),
    ],
)
def test_a_channel_that_cannot_be_is_refused(modules: list[Any], message: str) -> None:
    with pytest.raises(fo.SideInputError, match=message):
        fo.Sequential(*modules)(drawn(2, 3), r=drawn(2, 3))


@every_dtype
@pytest.mark.parametrize("outside", [True, False])
def test_autocast_is_read_where_the_sequence_runs(outside: bool, dtype: torch.dtype) -> None:
    model = fo.Sequential(ops.Linear(16, 16), ops.SiLU())
    x = drawn(3, 16).requires_grad_()
    if dtype is torch.float32:
        y = model(x)
    elif outside:
        with torch.autocast("cpu", dtype), fo.fusion(False):
            y = model(x)
    else:
        with fo.fusion(False), torch.autocast("cpu", dtype):
            y = model(x)
    assert y.dtype is dtype
    weight, bias = (p.detach().to(dtype).double() for p in model.parameters())
    expected = F.silu(F.linear(x.detach().to(dtype).double(), weight, bias).to(dtype).double())
    close(y, expected, dtype)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


# --- fused ops


class Fused(NamedTuple):
    """A chain that a rule takes, with what it computes."""

    rule: str
    make: Callable[[torch.dtype], fo.Sequential]
    reference: Reference  # (x, p, dtype)


def stored(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t, of float64, with the rounding of a store in `dtype`, which gradients do not see."""
    return t + (t.detach().to(dtype).double() - t.detach())


def linear(x: Tensor, p: Tensors) -> Tensor:
    return F.linear(x, p["0.weight"], p.get("0.bias"))


def add_norm(x: Tensor, p: Tensors, dtype: torch.dtype) -> Tensor:
    """Of its four roundings the tolerance of float16 has room for the last two."""
    h = stored(stored(F.linear(x, p["1.weight"], None), dtype) + x, dtype)
    return F.rms_norm(h, (16,), p["4.weight"], 1e-5) + h


FUSED = {
    "linear, bias, activation": Fused(
        "linear_act",
        lambda dtype: fo.Sequential(ops.Linear(16, 16, dtype=dtype), ops.GELU("tanh")),
        lambda x, p, _: tanh_gelu(linear(x, p)),
    ),
    "dbias and dactivation": Fused(
        "bias_act",
        lambda dtype: fo.Sequential(ops.Bias(16, dtype=dtype), ops.ReLU()),
        lambda x, p, _: F.relu(x + p["0.bias"]),
    ),
    "add and norm": Fused(
        "norm_add",
        lambda dtype: fo.Sequential(
            ops.Tap("r"),
            ops.Linear(16, 16, bias=False, dtype=dtype),
            *(ops.Add("r"), ops.Tap("s"), ops.RMSNorm(16, eps=1e-5, dtype=dtype), ops.Add("s")),
        ),
        add_norm,
    ),
}


@every_dtype
@pytest.mark.parametrize("case", FUSED.values(), ids=list(FUSED))
def test_fused_ops_fire_and_agree(case: Fused, dtype: torch.dtype) -> None:
    model = case.make(dtype)
    x = drawn(6, 16, dtype=dtype)
    agree(model, lambda x, p: case.reference(x, p, dtype), x)
    assert case.rule in assert_fused_matches_unfused(model, x)


# --- whole blocks, checkpoints and loops


@every_dtype
@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm])
def test_a_norm_and_an_mlp(norm: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = fo.Sequential(
        norm(32, dtype=dtype),
        *(ops.Linear(32, 128, bias=False, dtype=dtype), ops.SwiGLU()),
        *(ops.Linear(64, 32, bias=False, dtype=dtype), ops.Bias(32, dtype=dtype)),
    )
    plain = copy.deepcopy(model).double()
    x = drawn(8, 32, dtype=dtype)
    with fo.reference():
        expected = plain(x.double())
    # three roundings of what is multiplied again, as their test of the module allows
    torch.testing.assert_close(
        model(x).double(), expected, rtol=4 * TOLERANCES[dtype], atol=4 * TOLERANCES[dtype]
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.zero_grad()
    y = model(drawn_of_step())
    y.square().mean().backward()
    optimizer.step()
    return [y.detach(), *(p.detach().clone() for p in model.parameters())]


def drawn_of_step() -> Tensor:
    return torch.linspace(-1, 1, 96).view(6, 16)


def test_two_steps_after_a_checkpoint_repeat_bit_for_bit() -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fo.Sequential(ops.RMSNorm(16), ops.Linear(16, 16), ops.GELU())
        return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)

    model, optimizer = built()
    step(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    wanted = [step(model, optimizer) for _ in range(2)]
    file.seek(0)
    resumed, again = built()
    for target, state in zip((resumed, again), torch.load(file), strict=True):
        target.load_state_dict(state)
    for mine, theirs in zip([step(resumed, again) for _ in range(2)], wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_training_and_inference_in_turn(how: str) -> None:
    modes: dict[str, Callable[[], Any]] = {
        "eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode
    }  # fmt: skip
    model = fo.Sequential(ops.Linear(16, 32), ops.SwiGLU(), ops.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    others = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        with modes[how]():
            model.train(how != "eval")(drawn_of_step())
        mine, theirs = step(model.train(), optimizer), step(twin, others)
        assert all(map(torch.equal, mine, theirs))


# --- ops and fusions of one's own


class Axpy(fo.Op):
    """a x + y, y a side input."""

    reads = ("y",)

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def fwd(self, x: Tensor, *, a: Tensor, y: Tensor) -> Tensor:
        return a * x + y


class LinearSiLU(FusedOp):
    """A Linear and a SiLU by plain torch: forward, or joint."""

    class Saved(NamedTuple):
        x: Tensor | None
        weight: Tensor | None

    names = {"x": "0.x", "weight": "0.weight"}
    ran = 0

    def fwd(self, x: Tensor, t: Any, calls: tuple[Call, ...], keep: Any = None) -> Out:
        type(self).ran += 1
        h = F.linear(x, t[0]["weight"])
        if keep is not None:
            return Out(F.silu(h), self.Saved(x, t[0]["weight"]))
        fc, act = self.members
        first = fc.fwd(x, weight=t[0]["weight"], bias=None, call=calls[0])
        return Out(F.silu(h), (first.saved, act.fwd(h).saved))

    def bwd(self, saved: Any, dy: Tensor, calls: Any, dside: Any) -> tuple[Grads, ...]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in saved]
            dx, dw = torch.autograd.grad(F.silu(F.linear(*leaves)), leaves, dy)
        return Grads(dx, {"weight": dw}), Grads()


class ScaleBackward(FusedOp):
    """The backward of a Linear and a ConstantScale, scaled once."""

    ran = 0

    def bwd(self, saved: Any, dy: Tensor, calls: Any, dside: Any) -> tuple[Grads, ...]:
        type(self).ran += 1
        fc, scale = self.members
        return fc.bwd(saved[0], scale.bwd(saved[1], dy).x, call=calls[0]), Grads()


def test_an_op_of_ones_own() -> None:
    agree(Axpy(), lambda x, p, y: p["a"] * x + y, drawn(4, 6), y=drawn(4, 6))


OWN = {
    "forward": (fo.Rule("own", (ops.Linear, ops.SiLU), LinearSiLU, "forward"), LinearSiLU),
    "joint": (fo.Rule("own", (ops.Linear, ops.SiLU), LinearSiLU, "joint"), LinearSiLU),
    "backward": (
        fo.Rule("own", (ops.Linear, ops.ConstantScale), ScaleBackward, "backward"),
        ScaleBackward,
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_fusion_of_ones_own(kind: str) -> None:
    rule, fused = OWN[kind]
    second = ops.ConstantScale(-2.5) if kind == "backward" else ops.SiLU()
    model = fo.Sequential(ops.Linear(8, 8, bias=False), second)
    act = (lambda h: -2.5 * h) if kind == "backward" else F.silu
    before = fused.ran  # type: ignore[attr-defined]
    with fo.rules(rule):
        agree(model, lambda x, p: act(F.linear(x, p["0.weight"])), drawn(5, 8))
    assert fused.ran > before  # type: ignore[attr-defined]
