"""Expert MLPs under a recipe: equal to their ops one by one, in no more saved bytes than high precision."""

from typing import Any

import fresh
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fuseops as fo
from fuseops.kernels.registry import as_if_on
from fuseops.observe import gemms
from fuseops.ops import scopes
from fuseops.recipes import operands
from fuseops.rules.fused import wgrad_order
from fuseops.rules.fused.grouped_mlp import GroupedMLP
from fuseops.testing import assert_fused_matches_unfused

D, F, E, K, T = 128, 128, 3, 2, 200
BLOCK = fo.recipes.Float8BlockScaling
RECIPES = [
    BLOCK(),
    BLOCK(wgrad="block"),
    BLOCK(wgrad="bf16"),
    BLOCK(bwd=torch.float8_e5m2),
    fo.recipes.Float8CurrentScaling(),
]


def varied(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose magnitude changes from token to token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    exponents = torch.randint(-4, 4, (shape[0], 1), generator=generator)
    return (x * torch.exp2(exponents.float())).bfloat16()


def layer(**options: Any) -> fo.MoE:
    torch.manual_seed(0)
    return fo.MoE(D, F, E, K, dtype=torch.bfloat16, **options)


def experts() -> tuple[fo.Sequential, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=False),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, bias=False),
        }
    ).bfloat16()
    offs = torch.tensor([130, 130, 300], dtype=torch.int32)
    return model, varied(310, D), {"offs": offs, "probs": torch.rand(310)}


def gradients(model: fo.Sequential, x: Tensor, **side: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    dy = varied(len(x), D, seed=3)
    y = model(x, **side)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("wants", ["all", "x", "weights"])
def test_a_layer_equals_its_ops_one_by_one(recipe: Any, wants: str) -> None:
    model, x = layer(), varied(T, D)
    if wants == "x":
        model.requires_grad_(False)
    x.requires_grad_(wants != "weights")
    fired = assert_fused_matches_unfused(model, x, recipe=recipe)
    assert fired == ("routed_mlp",)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_experts_equal_their_ops_one_by_one_bit_for_bit(recipe: Any) -> None:
    model, x, side = experts()
    with fo.recipe(recipe):
        fused = gradients(model, x, **side)
        with fo.fusion(False):
            unfused = gradients(model, x, **side)
    for mine, theirs in zip(fused, unfused, strict=True):
        assert torch.equal(mine, theirs)


def dense(d: int = D, f: int = F) -> fo.Sequential:
    torch.manual_seed(0)
    fc1, fc2 = fo.ops.Linear(d, 2 * f, bias=False), fo.ops.Linear(f, d, bias=False)
    return fo.Sequential(fo.ops.RMSNorm(d), fc1, fo.ops.SwiGLU(), fc2).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(310, D), (2, 155, D)], ids=str)
def test_a_dense_mlp_equals_its_ops_one_by_one_bit_for_bit(
    recipe: Any, shape: tuple[int, ...]
) -> None:
    model = dense()
    leaves = [varied(310, D).view(shape).requires_grad_(), *model.parameters()]
    with fo.recipe(recipe):
        found = []
        for fusion in (True, False):
            with fo.fusion(fusion):
                y = model(leaves[0])
            found.append([y, *torch.autograd.grad(y, leaves, varied(310, D, seed=3).view(shape))])
        assert [span.rule for span in model.plan(leaves[0]).forward] == ["norm_mlp"]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_the_producers_of_a_dense_mlp_write_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass quantizes what the norm, SwiGLU or its backward has made: of tensors only dy is. The columns of dh are
    made of its codes when dx is there.
    """
    passes: list[tuple[int, ...]] = []
    for name in ("quantize_operand", "quantize_vectors", "permute_operand"):
        kernel = getattr(operands.K, name)

        def seen(x: Tensor, *args: Any, kernel: Any = kernel) -> Any:
            passes.append(tuple(x.shape))
            return kernel(x, *args)

        monkeypatch.setattr(operands.K, name, seen)
    model, x = dense(D, 2 * F), varied(200, D).requires_grad_()
    for recipe in (BLOCK(), BLOCK(hidden="float8")):
        with fo.recipe(recipe):
            y = model(x)
        if recipe.hidden == "bf16":
            assert not passes
        del passes[:]
        y.backward(varied(200, D, seed=3))
        assert passes == [(200, D), (200, 4 * F)]
        del passes[:]


def test_a_dense_hidden_in_float8_is_half_of_what_is_saved() -> None:
    model, x = dense(D, 8 * F), varied(200, D).requires_grad_()
    saved = []
    for recipe in (None, BLOCK(), BLOCK(hidden="float8")):
        with fo.recipe(recipe):
            plan = model.plan(x)
        saved.append(
            sum(t.nbytes for t in plan.saved if t.name == "2.x" or t.name.startswith("2.x."))
        )
    high, same, half = saved
    assert same == high and half <= 0.55 * high


def saved_bytes(model: fo.Sequential, x: Tensor, recipe: Any, **side: Tensor) -> int:
    """Bytes kept for the backward beyond parameters and the input."""
    with fo.recipe(recipe):
        plan = model.plan(x.detach().requires_grad_(), **side)
    return sum(t.nbytes for t in plan.saved if not t.name.endswith(".x") or "act" in t.name)


def test_saved_bytes_are_those_of_high_precision_or_half_of_them() -> None:
    model, x, side = experts()
    high = saved_bytes(model, x, None, **side)
    assert saved_bytes(model, x, BLOCK(), **side) <= high
    assert saved_bytes(model, x, BLOCK(hidden="float8"), **side) <= 0.55 * high
    whole, tokens = layer(), varied(T, D)
    high = saved_bytes(whole, tokens, None)
    assert saved_bytes(whole, tokens, BLOCK()) <= high
    assert saved_bytes(whole, tokens, BLOCK(hidden="float8")) <= 0.6 * high


def test_a_hidden_in_float8_is_what_the_forward_reads_too() -> None:
    model, x, side = experts()
    recipe = BLOCK(hidden="float8")
    with fo.recipe(recipe):
        fused = gradients(model, x, **side)
    fc1, act, fc2 = model
    # the same by hand: h through its codes, with the gradient of the tensor itself
    with fo.recipe(BLOCK()):
        leaf = x.detach().requires_grad_()
        h = fo.Sequential(fc1)(leaf, offs=side["offs"])
        q = fo.quantize(h.detach(), fo.recipes.Scaling()).dequantize()
        y = fo.Sequential(act, fc2)(h + (q - h.detach()), **side)
        unfused = [y, *torch.autograd.grad(y, [leaf, *model.parameters()], varied(310, D, seed=3))]
    for mine, theirs in zip(fused, unfused, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_repeated_step_makes_and_prints_no_format(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    """What follows from one is found when it is made: half of the Python calls of a small step were this."""
    model, asked = layer(), []
    with fo.recipe(recipe, strict=True):
        for _ in range(2):
            gradients(model, varied(96, D))
        for name in ("__post_init__", "__str__", "__repr__"):
            monkeypatch.setattr(fo.recipes.Scaling, name, lambda *_, name=name: asked.append(name))
        gradients(model, varied(96, D))
    assert asked == []


@pytest.mark.parametrize(
    "recipe",
    [*RECIPES, fo.recipes.MXFP8BlockScaling(), fo.recipes.NVFP4BlockScaling()],
    ids=str,
)
def test_which_weight_gradient_comes_first_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    found = []
    for parts, waits in ((0, False), (0, True), (1, False)):
        monkeypatch.setattr(wgrad_order, "choose_parts", lambda *_, parts=parts: parts)
        monkeypatch.setattr(wgrad_order, "wgrad_waits_for_dx", lambda *_, waits=waits: waits)
        with fo.recipe(recipe, strict=True):
            found.append(gradients(layer(), varied(96, D)))
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


@pytest.mark.parametrize(
    "recipe",
    [
        BLOCK(),
        BLOCK(bwd=torch.float8_e5m2),
        BLOCK(hidden="float8"),
        BLOCK(wgrad="block"),
        fo.recipes.Float8CurrentScaling(),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [512, 656])
def test_columns_in_parts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, width: int
) -> None:
    """Some features of tokens at a time, the last of which may be few."""
    found, cut = [], wgrad_order.slice_features
    sizes: set[int] = set()
    monkeypatch.setattr(
        wgrad_order,
        "slice_features",
        lambda q, at, size: (sizes.add(size), cut(q, at, size))[1],
    )
    torch.manual_seed(0)
    model = fo.MoE(width, F, E, K, dtype=torch.bfloat16)
    x, dy = varied(T, width), varied(T, width, seed=3)
    for parts in (0, 1, 2, 4):
        monkeypatch.setattr(wgrad_order, "choose_parts", lambda *_, parts=parts: parts)
        with fo.recipe(recipe, strict=True):
            y = model(leaf := x.detach().requires_grad_())
            found.append([y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert sizes == ({128, 256} if width == 512 else {144, 256, 272, 384})


@pytest.mark.parametrize(
    "sizes, copied",
    [
        ((8192, 4096, 14336, 8, 2), 0.89),
        ((8192, 7168, 2048, 32, 8), 0.86),
        ((32768, 2048, 768, 128, 8), 0.986),
        ((16384, 2048, 768, 128, 8), 0.96),
        ((8192, 2048, 768, 128, 8), 0.95),
        ((24576, 1536, 256, 128, 8), 1.12),
        ((32768, 4096, 1024, 64, 4), 0.98),
    ],
)
def test_the_planned_peak_of_a_layer_is_at_most_that_of_high_precision(
    sizes: tuple[int, ...], copied: float
) -> None:
    """What the last weight gradient reads is columns (F + D) of codes, beside 4 F of a dh in bfloat16: of narrow
    experts more, unless those of D are there in parts.

    copied: how much of it others may plan, whose rows or columns are made of copies of rows in bfloat16
    """
    tokens, *widths, experts, top_k = sizes
    with FakeTensorMode():
        moe = fo.MoE(*widths, experts, top_k, dtype=torch.bfloat16)
        x = torch.empty(tokens, widths[0], dtype=torch.bfloat16, requires_grad=True)
    codes = BLOCK(), BLOCK(weights="step"), BLOCK(hidden="float8")
    copies = BLOCK(wgrad="block"), fo.recipes.Float8CurrentScaling()
    peaks = []
    for recipe in (None, *codes, *copies):
        with as_if_on(90), fo.recipe(recipe, strict=recipe is not None):
            plan = moe.plan(x)
        assert plan.rehearsed
        peaks.append(plan.peak_bytes)
    high, of_codes, of_copies = peaks[0], peaks[1:4], peaks[4:]
    assert max(of_codes) <= high
    assert max(of_copies) <= copied * high


class Tables(TorchDispatchMode):
    """The tile tables that are made, and that weight gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.given = 0, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.fuseops.group_tiles.default
        if func in WEIGHT_GRADIENTS:
            self.given.append(args[WEIGHT_GRADIENTS[func]])
        return func(*args, **(kwargs or {}))


WEIGHT_GRADIENTS = {
    torch.ops.fuseops.fp8_wgrad.default: 6,
    torch.ops.fuseops.fp8_wgrad_into.default: 7,
}  # and where the table stands


@pytest.mark.parametrize(
    "recipe, count",
    [(BLOCK(), 8), (BLOCK(wgrad="block"), 16), (fo.recipes.Float8CurrentScaling(), 16)],
    ids=str,
)
def test_one_table_of_tiles_does_for_all_products_of_a_step(recipe: Any, count: int) -> None:
    """Each of the parts of a weight gradient made one of its own, which is not replayed: a small step took 5 times as
    long on the host as in bfloat16.
    """
    with FakeTensorMode():
        moe = fo.MoE(4096, 1024, 64, 4, dtype=torch.bfloat16)
        x = torch.empty(32768, 4096, dtype=torch.bfloat16, requires_grad=True)
        with Tables() as tables, as_if_on(90), fo.recipe(recipe, strict=True):
            moe(x).sum().backward()
    assert tables.made == 1
    assert len(tables.given) == count and None not in tables.given


@pytest.mark.parametrize("recipe", [BLOCK(), fo.recipes.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("tokens", [64, 1024])
def test_few_tokens_are_multiplied_in_one_part(tokens: int, recipe: Any) -> None:
    """Their step waits for the host, and the columns that it might have in parts are few bytes."""
    with FakeTensorMode():
        moe = fo.MoE(1024, 512, 32, 4, dtype=torch.bfloat16)
        x = torch.empty(tokens, 1024, dtype=torch.bfloat16, requires_grad=True)
        with Tables() as tables, as_if_on(90), fo.recipe(recipe, strict=True):
            moe(x).sum().backward()
    assert len(tables.given) == 2


@pytest.mark.parametrize(
    "recipe, shape, parts, waits",
    [
        (BLOCK(), (64, 4, 4096, 1024), 4, False),
        (BLOCK(), (8, 2, 512, 256), 0, False),
        (fo.recipes.Float8CurrentScaling(), (128, 8, 2048, 768), 0, True),
        (fo.recipes.Float8CurrentScaling(), (8, 2, 2048, 14336), 0, False),
    ],
)
def test_an_order_for_the_peak_is_said(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Any,
    shape: tuple[int, ...],
    parts: int,
    waits: bool,
) -> None:
    """By what `explain()` asks when a GEMM runs."""
    experts, top_k, *widths = shape
    said, fc1_and_act = set(), GroupedMLP.fc1_and_act

    def asking(*args: Any) -> Any:
        said.add(gemms.backward_choices())
        return fc1_and_act(*args)

    monkeypatch.setattr(GroupedMLP, "fc1_and_act", asking)
    with FakeTensorMode():
        moe = fo.MoE(*widths, experts, top_k, dtype=torch.bfloat16)
        x = torch.empty(32768, widths[0], dtype=torch.bfloat16, requires_grad=True)
    with as_if_on(90), fo.recipe(recipe, strict=True):
        moe.plan(x)
    assert said == {wgrad_order.describe(parts, waits)}
    assert all(f"in {parts} parts of their features" in words for words in said) or not parts


def test_the_weight_gradient_of_squares_rounds_what_the_forward_read() -> None:
    """x of powers of two times a code is exact in rows, and in columns while the shift keeps its bits."""
    exact = torch.randint(-8, 9, (256, D)).bfloat16()
    exact[:, ::128] = 448.0  # every vector has the scale 1
    dy = torch.randint(-8, 9, (256, 64)).bfloat16()
    dy[:, 0] = 448.0
    op = fo.ops.Linear(D, 64, bias=False, dtype=torch.bfloat16)
    with fo.recipe(BLOCK()):
        op(exact).backward(dy)
    want = (dy.double().t() @ exact.double()).bfloat16()
    assert op.weight.grad is not None and torch.equal(op.weight.grad, want)


def test_a_plan_says_which_operands_are_quantized() -> None:
    plans: list[Any] = []
    with fo.recipe(BLOCK()), scopes.watch_plans(plans.append):
        layer()(varied(T, D))
    found = {o.op for plan in plans for o in plan.operands}
    assert found == {"fc1", "fc2"}


PEAKS_UNDER_DYNAMO = """
import weakref
import torch
import fuseops as fo
from fuseops.kernels.registry import as_if_on

class Thing: pass

def dies(thing):
    there = weakref.ref(thing)
    del thing
    return there() is None

def peaks():
    found = []
    with torch.device("meta"):
        moe = fo.MoE(2048, 768, 128, 8, dtype=torch.bfloat16)
        x = torch.empty(16384, 2048, dtype=torch.bfloat16, requires_grad=True)
        linear, norm = fo.ops.Linear, fo.ops.RMSNorm(2048, dtype=torch.bfloat16)
        up, down = (linear(*w, bias=False, dtype=torch.bfloat16) for w in ((2048, 8192), (4096, 2048)))
        dense = fo.Residual(norm, up, fo.ops.SwiGLU(), down)
    r = fo.recipes
    for model, recipe in ((moe, None), (moe, r.Float8CurrentScaling()), (dense, r.Float8BlockScaling())):
        with as_if_on(90), fo.recipe(recipe, strict=recipe is not None):
            found.append(model.plan(x).peak_bytes)
    return found

@torch.compile(backend="eager", fullgraph=True)
def refused(x):
    torch._dynamo.graph_break()

before = peaks()
assert dies(Thing())
try:
    refused(torch.ones(2))
except torch._dynamo.exc.Unsupported:
    pass
print("evaluator" if not dies(Thing()) else "none")
assert peaks() == before
"""


def test_the_planned_peak_is_the_same_where_dynamo_evaluates_frames() -> None:
    """Its evaluator, which a compilation that failed leaves behind, keeps what is passed until the call returns."""
    ran = fresh.run("-c", PEAKS_UNDER_DYNAMO)
    assert ran.returncode == 0, ran.stderr
    if "evaluator" not in ran.stdout:
        pytest.skip("this torch takes its evaluator away when a compilation fails")
