"""GroupedLinear with one Parameter a group: the packed op in all it computes, packed again when it comes apart."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.errors import InPlaceError
from fuseops.ops.packing import alias_of

E, D, F = 3, 6, 4
COUNTS = st.lists(st.integers(0, 3), min_size=E, max_size=E)


def experts(**options: Any) -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=False, **options),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, **options),
        }
    ).double()


def pair() -> tuple[fo.Sequential, fo.Sequential]:
    """The same experts, packed and by group."""
    whole, apart = experts(), experts(packed=False)
    apart.load_state_dict(whole.state_dict())
    return whole, apart


def step(model: Any, counts: list[int]) -> tuple[Tensor, Tensor]:
    rows = sum(counts) + 1
    x = torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    x.requires_grad_()
    probs = torch.linspace(0.1, 1, rows, dtype=torch.float64)
    y = model(x, fo.Routing.from_counts(counts, probs))
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def gradient(op: Any, name: str) -> Tensor:
    return torch.stack([getattr(op, key).grad for key in op.registered(name)])


def one_storage(op: Any) -> bool:
    """Neither copied nor apart."""
    return all(
        getattr(op, name).data_ptr() == getattr(op, f"{name}0").data_ptr()
        for name in ("weight", "bias")
        if f"{name}0" in op._parameters
    )


@given(COUNTS, st.booleans())
def test_it_computes_what_the_packed_op_does(counts: list[int], fused: bool) -> None:
    whole, apart = pair()
    with fo.fusion(fused):
        for a, b in zip(step(whole, counts), step(apart, counts), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name, op in whole.named_children():
        for key, p in op.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(gradient(apart[name], key), p.grad, rtol=0, atol=0)


def test_every_group_is_a_parameter_over_one_storage() -> None:
    op = fo.ops.GroupedLinear(E, D, F, packed=False)
    assert [*op.state_dict()] == [f"{n}{e}" for n in ("weight", "bias") for e in range(E)]
    assert op.weight.shape == (E, F, D) and op.bias is not None and op.bias.shape == (E, F)
    assert one_storage(op) and op.repacks == 0
    assert "packed=False" in repr(op) and "packed" not in repr(fo.ops.GroupedLinear(E, D, F))
    with torch.no_grad():
        op.weight2.fill_(7)
    assert (op.weight[2] == 7).all() and not (op.weight[1] == 7).any()


def test_the_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(3)
    whole = fo.ops.GroupedLinear(E, D, F)
    torch.manual_seed(3)
    assert torch.equal(fo.ops.GroupedLinear(E, D, F, packed=False).weight, whole.weight)


SEPARATE: dict[str, Any] = {
    "to": lambda op: op.to(torch.float32),
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
    "to_empty": lambda op: op.to_empty(device="cpu"),
    "meta": lambda op: op.to("meta"),
    "assign": lambda op: (
        op.load_state_dict({k: p.clone() for k, p in op.state_dict().items()}, assign=True),
        op,
    )[1],
}


@pytest.mark.parametrize("how", SEPARATE)
def test_what_separates_the_groups_packs_them_again_and_counts(how: str) -> None:
    op = fo.ops.GroupedLinear(E, D, F, packed=False, dtype=torch.float64)
    before = [*op.parameters()]
    values = op.weight.detach().clone()
    other = SEPARATE[how](op)
    assert other.repacks == 1 and one_storage(other)
    assert alias_of([other.weight0, other.weight1, other.weight2]) is not None
    if how in ("to", "to_empty"):  # an optimizer holds them
        assert all(a is b for a, b in zip(other.parameters(), before, strict=True))
    if how not in ("to_empty", "meta"):
        torch.testing.assert_close(other.weight.double(), values, rtol=1e-6, atol=0)
    assert other.to(other.weight.dtype).repacks == 1  # nothing to do


def test_groups_that_lie_apart_are_copied_until_they_are_packed() -> None:
    whole, apart = pair()
    repacks = apart["fc1"].repacks
    apart["fc1"].weight1.data = apart["fc1"].weight1.data.clone()
    assert not one_storage(apart["fc1"]) or apart["fc1"].weight._base is None
    for a, b in zip(step(whole, [2, 0, 1]), step(apart, [2, 0, 1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(gradient(apart["fc1"], "weight"), whole["fc1"].weight.grad)
    assert apart["fc1"].repack() and apart["fc1"].repacks == repacks + 1
    assert one_storage(apart["fc1"]) and not apart["fc1"].repack()


def test_neighbours_by_chance_are_not_one_storage() -> None:
    block = torch.zeros(4 * D)
    a, b = block[:D], block[D : 2 * D]
    assert alias_of([a, b]) is not None
    assert alias_of([b, a]) is None and alias_of([a, a]) is None
    assert alias_of([block[3 * D :], a]) is None
    assert alias_of([a, block[D : 2 * D].double()]) is None
    alone = torch.zeros(2, D).untyped_storage()
    short = torch.empty(0).set_(alone, 0, (D,))
    assert alias_of([short, torch.empty(0).set_(alone, D, (D,)), a]) is None


@pytest.mark.parametrize("edited", range(E))
def test_an_in_place_edit_of_any_group_is_seen(edited: int) -> None:
    apart = copy.deepcopy(experts(packed=False))  # packed again: no shared version counter
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    routing = fo.Routing.from_counts([1, 1, 1], torch.ones(3, dtype=torch.float64))
    y = apart(x, routing).sum()
    with torch.no_grad():
        getattr(apart["fc2"], f"weight{edited}").mul_(2)
    with pytest.raises((InPlaceError, RuntimeError), match=r"in.?place"):
        y.backward()


def test_a_frozen_group_gets_no_gradient_and_a_frozen_weight_computes_none() -> None:
    whole, apart = pair()
    apart["fc1"].weight1.requires_grad_(False)
    step(whole, [2, 2, 1]), step(apart, [2, 2, 1])
    assert apart["fc1"].weight1.grad is None and whole["fc1"].weight.grad is not None
    torch.testing.assert_close(apart["fc1"].weight2.grad, whole["fc1"].weight.grad[2])
    for p in apart["fc1"].parameters():
        p.requires_grad_(False)
    plan = apart.plan(
        torch.randn(2, D).double(), fo.Routing.from_counts([1, 1, 0], torch.ones(2).double())
    )
    assert not any(s.name.startswith("fc1.x") for s in plan.saved)


def test_the_packed_weight_is_a_parameter_to_explain() -> None:
    _, apart = pair()
    x = torch.randn(2, D).double().requires_grad_()
    plan = apart.plan(x, fo.Routing.from_counts([1, 1, 0], torch.ones(2).double()))
    weights = [s for s in plan.saved if s.name in ("fc1.weight", "fc2.weight")]
    assert len(weights) == 2 and all(s.is_param and s.nbytes == 0 for s in weights)


def test_functional_call_and_checkpoint() -> None:
    whole, apart = pair()
    expected = step(whole, [2, 0, 1])
    y = step(lambda *a: checkpoint(apart, *a, use_reentrant=False), [2, 0, 1])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradient(apart["fc1"], "weight"), whole["fc1"].weight.grad)
    given_ = {k: p.detach().clone().requires_grad_() for k, p in apart.named_parameters()}
    blank = experts(packed=False)
    torch.testing.assert_close(
        step(lambda *a: functional_call(blank, given_, a), [2, 0, 1]), expected
    )
    torch.testing.assert_close(given_["fc1.weight1"].grad, whole["fc1"].weight.grad[1])
    with fo.reference():
        x = torch.randn(3, D).double()
        routing = fo.Routing.from_counts([1, 1, 1], torch.ones(3).double())
        torch.func.grad(lambda p: functional_call(blank, p, (x, routing)).sum())(given_)


def test_compiled() -> None:
    torch.compiler.reset()
    whole, apart = pair()
    compiled = torch.compile(apart, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, [2, 0, 1]), step(whole, [2, 0, 1]))
    torch.testing.assert_close(gradient(apart["fc1"], "weight"), whole["fc1"].weight.grad)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("packed", [True, False])
def test_fsdp2(packed: bool, alone: None) -> None:
    whole, sharded = experts(), experts(packed=packed)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for a, b in zip(step(sharded, [2, 0, 1]), step(whole, [2, 0, 1]), strict=True):
        torch.testing.assert_close(a, b)
    for name, op in whole.named_children():
        for key, p in op.named_parameters():
            grads = [
                getattr(sharded[name], k).grad.full_tensor() for k in sharded[name].registered(key)
            ]
            torch.testing.assert_close(grads[0] if packed else torch.stack(grads), p.grad)


# --- main_grad and delayed gradients


@given(COUNTS, st.sampled_from(["one buffer", "apart", "reversed"]), st.booleans(), st.booleans())
def test_main_grads_of_the_groups(
    counts: list[int], where: str, delayed: bool, overwrite: bool
) -> None:
    whole = experts()
    step(whole, counts)
    apart = experts(packed=False, accumulate_into_main_grad=True, delay_wgrad=delayed)
    apart.load_state_dict(whole.state_dict())
    start = torch.nan if overwrite else 1.0
    for op in (apart["fc1"], apart["fc2"]):
        for name in ("weight", "bias"):
            if getattr(op, name) is None:
                continue
            keys = op.registered(name)
            buffer = torch.full_like(getattr(op, name), start)
            order = keys[::-1] if where == "reversed" else keys
            for key, row in zip(order, buffer, strict=True):
                p = getattr(op, key)
                p.main_grad = row.clone() if where == "apart" else row
                p.overwrite_main_grad = overwrite
                p.grad_added_to_main_grad = False
    step(apart, counts)
    apart.backward_dw()
    for name, op in whole.named_children():
        for key, p in op.named_parameters():
            mains = torch.stack(
                [getattr(apart[name], k).main_grad for k in apart[name].registered(key)]
            )
            torch.testing.assert_close(mains - (0 if overwrite else 1), p.grad)
    # autograd accumulates zeros where a wrapper waits for it, and nothing of what was put off
    dummies = [p.grad for p in apart.parameters() if p.grad is not None]
    assert not any(grad.any() for grad in dummies)
    assert delayed or len(dummies) == len(list(apart.parameters()))
    assert all(p.grad_added_to_main_grad for p in apart.parameters())


@pytest.mark.parametrize("delayed", [False, True])
def test_a_frozen_group_needs_no_main_grad(delayed: bool) -> None:
    whole = experts()
    step(whole, [2, 1, 1])
    apart = experts(packed=False, accumulate_into_main_grad=True, delay_wgrad=delayed)
    apart.load_state_dict(whole.state_dict())
    apart["fc1"].weight1.requires_grad_(False)
    for p in apart.parameters():
        p.main_grad = torch.zeros_like(p) if p.requires_grad else None
    step(apart, [2, 1, 1])
    apart.backward_dw()
    for e in (0, 2):
        found = getattr(apart["fc1"], f"weight{e}").main_grad
        torch.testing.assert_close(found, whole["fc1"].weight.grad[e])


def test_delayed_gradients_of_the_groups() -> None:
    whole = experts()
    apart = experts(packed=False, delay_wgrad=True)
    apart.load_state_dict(whole.state_dict())
    apart["fc2"].weight1.requires_grad_(False)
    step(whole, [2, 0, 1]), step(apart, [2, 0, 1])
    assert apart["fc1"].weight0.grad is None
    assert apart.backward_dw() == 2 and apart["fc2"].weight1.grad is None
    torch.testing.assert_close(gradient(apart["fc1"], "weight"), whole["fc1"].weight.grad)
    torch.testing.assert_close(gradient(apart["fc2"], "bias"), whole["fc2"].bias.grad)


# --- state dicts


@given(st.booleans(), st.booleans(), st.integers(1, 12), st.booleans())
def test_a_state_dict_of_either_form_loads_into_either(
    packed: bool, into: bool, groups: int, assign: bool
) -> None:
    """Twelve groups: their numbers do not sort as text."""
    source = fo.ops.GroupedLinear(groups, D, F, packed=packed)
    target = fo.ops.GroupedLinear(groups, D, F, packed=into)
    holder = nn.ModuleDict({"fc": target})  # under a prefix
    state = {f"fc.{k}": v for k, v in source.state_dict().items()}
    state["fc._extra_state"] = torch.zeros(1)  # TransformerEngine's
    holder.load_state_dict(state, assign=assign)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)  # type: ignore[arg-type]
    assert [*target.state_dict()] == [*fo.ops.GroupedLinear(groups, D, F, packed=into).state_dict()]
    assert into or one_storage(target)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("weight1"), r'Missing key\(s\) in state_dict: "weight1"\.'),
        (
            lambda s: s.update(weight3=s["weight0"]),
            r'Unexpected key\(s\) in state_dict: "weight3"\.',
        ),
        (
            lambda s: s.update(weight1=torch.ones(2, 2)),
            r"weight1|weight0 to weight2 differ in shape",
        ),
        (
            lambda s: s.update(weight=torch.ones(E, F, D)),
            r"packed and by group \(weight0\)|\"weight\"",
        ),
    ],
)
def test_wrong_keys_are_named(packed: bool, change: Any, said: str) -> None:
    state = fo.ops.GroupedLinear(E, D, F, packed=False).state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=said) as caught:
        fo.ops.GroupedLinear(E, D, F, packed=packed).load_state_dict(state)
    assert str(caught.value).count('weight"') <= 1


def test_a_packed_weight_of_other_groups_is_refused() -> None:
    state = fo.ops.GroupedLinear(E + 1, D, F).state_dict()
    with pytest.raises(RuntimeError, match="expected 3 groups on the first axis"):
        fo.ops.GroupedLinear(E, D, F, packed=False).load_state_dict(state)
    missing = fo.ops.GroupedLinear(E, D, F).load_state_dict({}, strict=False)
    assert missing.missing_keys == ["weight", "bias"]


# --- axes before the rows


def test_the_gradient_of_a_scaled_bias_takes_probabilities_in_double() -> None:
    op, probs = fo.ops.GroupedLinear(E, D, F, scale_bias=True), torch.rand(5)
    grads = []
    for dtype in (torch.float64, torch.float32):
        own = probs.to(dtype).requires_grad_()
        y = op(torch.ones(5, D), offs=torch.tensor([2, 2, 5], dtype=torch.int32), probs=own)
        grads.append([g.float() for g in torch.autograd.grad(y.sum(), [op.bias, own])])
        assert own.dtype is dtype
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("recipe", [None, fo.recipes.Float8CurrentScaling()])
def test_axes_before_the_last_are_rows(scaled: bool, recipe: Any) -> None:
    op = fo.ops.GroupedLinear(E, D, F, scale_bias=scaled)
    x = torch.randn(2, 3, 4, D)
    probs = torch.rand(2, 3, 4)
    offs = torch.tensor([5, 5, 22], dtype=torch.int32)

    def run(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        op.zero_grad()
        leaves = [x.clone().requires_grad_(), *([probs.clone().requires_grad_()] if scaled else [])]
        with fo.recipe(recipe):
            y = op(leaves[0], offs=offs, **({"probs": leaves[1]} if scaled else {}))
        y.backward(torch.arange(float(y.numel())).sin().view(y.shape))
        return y, *(t.grad for t in leaves), *(p.grad.clone() for p in op.parameters())

    flat = run(x.view(-1, D), probs.view(-1))
    for a, b in zip(run(x, probs), flat, strict=True):
        assert torch.equal(a.reshape(b.shape), b)
    y, dx, *_ = run(x, probs)
    assert y.shape == (2, 3, 4, F) and dx.shape == x.shape
    for needs in ("x", "weight"):  # one gradient alone
        for p in op.parameters():
            p.requires_grad_(needs == "weight")
        with fo.recipe(recipe):
            y = (
                op(x.clone().requires_grad_(needs == "x"), offs=offs, probs=probs)
                if scaled
                else op(x.clone().requires_grad_(needs == "x"), offs=offs)
            )
        y.sum().backward()


def test_experts_over_more_axes_run_unfused_and_say_why() -> None:
    model = experts()
    x = torch.randn(2, 5, D).double()
    routing = fo.Routing.from_counts([3, 0, 6], torch.rand(2, 5).double())
    plan = model.plan(x, routing)
    assert ("grouped_mlp", (0, 3), "x has 3 axes, the fused op takes (rows, width)") in plan.misses
    flat = fo.Routing(routing.offs, routing.probs.view(-1))  # type: ignore[union-attr]
    torch.testing.assert_close(model(x, routing).view(10, D), model(x.view(10, D), flat))
    with pytest.raises(fo.FuseOpsError, match=r"of shape \(\.\.\., rows, 6\)"):
        model(x[0, 0], routing)


def test_offs_may_be_strided() -> None:
    op, x = fo.ops.GroupedLinear(E, D, F), torch.randn(9, D, requires_grad=True)
    ends = torch.arange(3, 3 + 2 * E, dtype=torch.int32)
    results = []
    for offs in (ends[::2], ends[::2].contiguous()):
        y = op(x, offs=offs)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *op.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
