"""Weights that live in FP8, their masters, and checkpoints with scales."""

import contextlib
import copy
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.ops.stored import stored_in
from fuseops.recipes import Scaling
from fuseops.recipes.scaling import SQUARE
from fuseops.testing.strategies import filled

RECIPE = fo.recipes.Float8BlockScaling()
D, F, E, K, T = 160, 96, 3, 2, 50
BF16 = torch.bfloat16


def moe() -> nn.Module:
    torch.manual_seed(0)
    return fo.MoE(D, F, E, K, dtype=BF16)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return fo.Sequential(
        {
            "norm": fo.ops.RMSNorm(D, dtype=BF16),
            "fc1": fo.ops.Linear(D, 2 * F, dtype=BF16),
            "act": fo.ops.SwiGLU(),
            "fc2": fo.ops.Linear(F, D, bias=False, dtype=BF16),
        }
    )


def tied() -> nn.Module:
    torch.manual_seed(0)
    first, second = (fo.ops.Linear(D, D, bias=False, dtype=BF16) for _ in "ab")
    second.weight = first.weight
    return fo.Sequential(first, fo.ops.SiLU(), second)


def stored(make: Any) -> nn.Module:
    with fo.quantized_init(RECIPE):
        model: nn.Module = make()
    return model


def tokens(seed: int = 1) -> Tensor:
    return filled((T, D), BF16, "normal", seed).requires_grad_()


def after(model: nn.Module, call: Any = None) -> list[Tensor | None]:
    x = tokens()
    with fo.recipe(RECIPE):
        y = model(x) if call is None else call(model, x)
    y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return [y.detach(), x.grad, *grads]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def recomputed(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)


def moved(model: nn.Module, x: Tensor) -> Any:
    with offload.to_host(min_bytes=0):
        return model(x)


def unfused(model: nn.Module, x: Tensor) -> Any:
    with fo.fusion(False):
        return model(x)


def copied(model: nn.Module, x: Tensor) -> Any:
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    y = twin(x)
    y.register_hook(lambda dy: None)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.register_hook(lambda grad, q=q: setattr(q, "grad", grad))
    return y


@pytest.mark.parametrize("make", [moe, dense])
@pytest.mark.parametrize("call", [None, recomputed, moved, unfused, copied])
def test_weights_in_fp8_give_what_weights_that_are_quantized_give(make: Any, call: Any) -> None:
    model = stored(make)
    assert fo.weights_changed(model) == 0  # there is no master, from which codes would be made
    assert_equal(after(model, call), after(make(), unfused if call is unfused else None))
    ops = [m for m in model.modules() if stored_in(m) is not None]
    assert len(ops) == 2
    for op in ops:
        weight = op._parameters["weight"]
        assert weight is not None and weight.isnan().all()
        assert weight.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("fused", [False, True])  # which moves no version of what it steps
@pytest.mark.parametrize("make", [moe, dense])
def test_a_step_with_masters_is_that_of_float32_weights_quantized_each_time(
    make: Any, fused: bool
) -> None:
    model, plain = stored(make), make()
    state = model.state_dict()
    plain.load_state_dict(state)  # what the codes stand for
    plain.float()
    for name in ("norm", "router"):
        if name in plain._modules:
            plain.get_submodule(name).to(BF16)
    optimizer = torch.optim.AdamW(fo.masters(model), lr=0.05, fused=fused)
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [m for m in model.modules() if stored_in(m) is not None]
    assert all(id(m._parameters["weight"]) not in own for m in held)
    for _ in range(3):
        x = tokens()
        with fo.recipe(RECIPE):
            model(x).float().square().mean().backward()
        masters = [stored_in(m).master for m in held]  # type: ignore[union-attr]
        assert all(
            m is not None and m.grad is not None and m.grad.dtype is torch.float32 for m in masters
        )
        before = [m.detach().clone() for m in masters]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(torch.equal(a, b) for a, b in zip(before, masters, strict=True))  # type: ignore[arg-type]
    with fo.recipe(RECIPE):
        y = model(tokens())
    again = make()
    for m, other in zip(
        held, [m for m in again.modules() if getattr(m, "multiplies", False)], strict=True
    ):
        other.weight.data = stored_in(m).master.detach().clone().to(BF16)  # type: ignore[union-attr]
    for m in held:
        want = fo.quantize(stored_in(m).master.detach(), stored_in(m).scaling, col=False)  # type: ignore[union-attr]
        assert torch.equal(
            stored_in(m).codes().data.view(torch.uint8), want.row.data.view(torch.uint8)
        )  # type: ignore[union-attr]
    again.float().load_state_dict(model.state_dict())  # in high precision: the masters
    for name, m in model.named_modules():
        if stored_in(m) is not None:
            assert torch.equal(again.get_submodule(name).weight, stored_in(m).master)  # type: ignore
    resumed = stored(make)
    resumed.load_state_dict(model.state_dict())
    with fo.recipe(RECIPE):
        assert torch.equal(resumed(tokens()), y)
    for m, other in zip(held, [m for m in resumed.modules() if stored_in(m)], strict=True):
        assert torch.equal(stored_in(m).master, stored_in(other).master)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_has_the_codes_of_its_masters(copy_of: Any) -> None:
    model = stored(dense)
    with torch.no_grad():
        for master in fo.masters(model):
            master.mul_(3)
    twin, x = copy_of(model), tokens()
    with fo.recipe(RECIPE):
        assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("how", ["step", "fused step", "load"])
def test_other_codes_between_a_forward_and_its_backward_are_an_error(how: str) -> None:
    with fo.quantized_init(RECIPE):  # no other parameter, whose version autograd would see
        model = fo.Sequential(fo.ops.Linear(160, 160, bias=False, dtype=BF16))
    optimizer = torch.optim.AdamW(fo.masters(model), fused=how == "fused step")
    with fo.recipe(RECIPE):
        first, second = (model(tokens()).float().sum() for _ in range(2))
    first.backward()
    model.load_state_dict(model.state_dict()) if how == "load" else optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("whose", ["of others", "without gradients"])
def test_a_step_that_writes_no_master_leaves_a_pending_backward(whose: str) -> None:
    model, other = stored(dense), stored(dense)
    stepped = other if whose == "of others" else model
    optimizer = torch.optim.SGD(fo.masters(stepped), lr=0.1)
    fo.masters(model)
    for seed in (1, 2):  # of which the first leaves gradients
        with fo.recipe(RECIPE):
            y = model(tokens(seed))
        if whose == "of others":
            after(other)
        else:
            optimizer.zero_grad()
        optimizer.step()
        y.sum().backward()


@pytest.mark.parametrize("make", [moe, dense, tied])
def test_masters_add_up_the_gradients_of_several_backwards(make: Any) -> None:
    model = stored(make)
    masters = fo.masters(model)

    def gradients(*seeds: int) -> list[Tensor]:
        for master in masters:
            master.grad = None
        for seed in seeds:
            with fo.recipe(RECIPE):
                y = model(tokens(seed))
            y.float().square().sum().backward()
        return [master.grad for master in masters]  # type: ignore[misc]

    first, second, both = gradients(1), gradients(2), gradients(1, 2)
    assert_equal(both, [a + b for a, b in zip(first, second, strict=True)])
    for module in model.modules():
        if (weight := stored_in(module)) is not None:
            assert len(weight.carrier._post_accumulate_grad_hooks) == 1


def test_hooks_on_masters_run_as_on_leaves_and_frozen_masters_get_nothing() -> None:
    first = stored(dense)
    masters = [m for m in fo.masters(first) if m.dim() > 1]
    for master in masters:
        master.requires_grad_(False)
    for model in (first, copy.deepcopy(first)):
        masters = [m for m in fo.masters(model) if m.dim() > 1]
        seen: dict[Tensor, Tensor] = {}

        def backward(model: nn.Module = model) -> None:
            with fo.recipe(RECIPE):
                model(tokens()).float().square().sum().backward()

        backward()
        assert all(master.grad is None for master in masters)
        for master in masters:
            master.requires_grad_(True)
        backward()
        expected = [-3 * master.grad for master in masters]  # type: ignore[operator]
        for master in masters:
            master.grad = None
            master.register_hook(lambda grad: -3 * grad)
            master.register_hook(lambda grad: None)
            master.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.update({p: p.grad.clone()})
            )
        backward()
        assert_equal([master.grad for master in masters], expected)
        assert_equal([seen[master] for master in masters], expected)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    ("dtype", "filed"),
    [(E4M3, False), (E4M3, True), (E5M2, False), (E5M2, True), (torch.float32, False)],
)
def test_a_weight_of_any_form_is_loaded_as_what_it_stands_for(
    dtype: torch.dtype, filed: bool, held: bool
) -> None:
    """filed: the file has a master.  held: the model has one"""
    model = stored(lambda: fo.Sequential(fo.ops.Linear(160, 160, bias=False)))
    weight: Any = stored_in(model[0])
    if held:
        fo.masters(model)
    values = torch.randn(160, 160)
    state = {"0.weight": values}
    if dtype is not torch.float32:
        given: Any = fo.quantize(values, Scaling(dtype, SQUARE, SQUARE), col=False)
        state = {"0.weight": given.row.data, "0.weight_scale_inv": given.row.scale}
        values = given.dequantize()
    if filed:
        state["0.weight_master"] = torch.randn(160, 160)
    model.load_state_dict({**state})
    want = fo.quantize(values, weight.scaling, col=False).dequantize()
    assert torch.equal(weight.values(torch.float32), want)
    expected = state["0.weight_master"] if filed else want if held else None
    assert_equal([weight.master], [expected])
    if weight.master is not None:
        assert not model.state_dict()["0.weight_master"].requires_grad
        assert model.state_dict(keep_vars=True)["0.weight_master"] is weight.master
    before = [t.clone().float() for t in weight.codes()[:2]]
    with pytest.raises(RuntimeError, match="size mismatch for 0"):
        model.load_state_dict({"0.weight": torch.randn(2, 160)})
    assert_equal([t.float() for t in weight.codes()[:2]], before)


@pytest.mark.parametrize("make", [moe, dense])
def test_a_checkpoint_with_scales_goes_in_and_out_bit_for_bit(make: Any) -> None:
    """As DeepSeek's have them: any float32 scale, codes of any size."""
    model = stored(make)
    state = model.state_dict()
    keys = [key for key in state if key.endswith("weight_scale_inv")]
    assert len(keys) == 2 and "weight_codes" not in str(list(state))
    generator = torch.Generator().manual_seed(5)
    for key in keys:
        codes = key.removesuffix("_scale_inv")
        assert state[codes].dtype is torch.float8_e4m3fn
        assert state[key].shape[-2:] == tuple(-(-n // 128) for n in state[codes].shape[-2:])
        state[key] = torch.rand(state[key].shape, generator=generator)
        raw = torch.randint(0, 127, state[codes].shape, generator=generator, dtype=torch.uint8)
        state[codes] = raw.view(torch.float8_e4m3fn)
    model.load_state_dict(state)
    out = model.state_dict()
    assert list(out) == list(state)
    for key, t in state.items():
        assert out[key].dtype is t.dtype and torch.equal(
            out[key].view(torch.uint8), t.view(torch.uint8)
        ), key
    with torch.device("meta"):
        empty = stored(make)
    empty.load_state_dict(state, assign=True)
    for key, t in empty.state_dict().items():
        assert torch.equal(t.view(torch.uint8), state[key].view(torch.uint8)), key
    with fo.recipe(RECIPE):
        assert torch.equal(empty(tokens()), model(tokens()))
    plain = make().float()
    plain.load_state_dict(state)
    for key in keys:
        name = key.removesuffix("_scale_inv")
        by_block = state[key].repeat_interleave(128, -2).repeat_interleave(128, -1)
        rows, width = state[name].shape[-2:]
        want = state[name].float() * by_block[..., :rows, :width]
        assert torch.equal(plain.state_dict()[name], want)
    fresh = stored(make)
    fresh.load_state_dict(make().state_dict())  # from high precision
    assert_equal(after(fresh), after(make()))


@pytest.mark.parametrize("call", [None, recomputed, moved, unfused, copied])
def test_ops_that_share_a_weight_share_its_codes(call: Any) -> None:
    model = stored(tied)
    assert_equal(after(model, call), after(tied(), unfused if call is unfused else None))
    assert len(fo.masters(model)) == 1


def test_ops_that_share_a_weight_stay_so() -> None:
    """Through steps, checkpoints, copies, other devices and dtypes."""

    def alike(model: Any) -> Tensor:
        with fo.recipe(RECIPE), torch.no_grad():
            x = tokens()
            first, second = model[0](x), model[2](x)
            assert torch.equal(first, second) and not first.isnan().any()
            return first

    model: Any = stored(tied)
    optimizer = torch.optim.SGD(fo.masters(model), lr=1.0)
    before = alike(model)
    with fo.recipe(RECIPE):
        model(tokens()).float().square().sum().backward()
    optimizer.step()
    assert fo.weights_changed(model) == 0
    now = alike(model)
    assert not torch.equal(before, now)
    state = model.state_dict()
    assert torch.equal(state["0.weight_master"], state["2.weight_master"])
    for part in ("weight", "weight_scale_inv"):
        assert torch.equal(
            state[f"0.{part}"].view(torch.uint8), state[f"2.{part}"].view(torch.uint8)
        )
    with torch.device("meta"):
        empty = stored(tied)
        assigned = stored(tied)
    empty.to_empty(device="cpu")
    assigned.load_state_dict(state, assign=True)
    fresh = stored(tied)
    for other in (fresh, empty):
        other.load_state_dict(state)
    for other in (fresh, empty, assigned, copy.deepcopy(model), model.float().to(BF16)):
        assert other.get_submodule("0").weight is other.get_submodule("2").weight
        assert torch.equal(alike(other), now)
        assert len(fo.masters(other)) == 1
    alone = copy.deepcopy(model[2])
    with fo.recipe(RECIPE), torch.no_grad():
        assert torch.equal(alone(tokens()), model[2](tokens()))


@pytest.mark.parametrize("make", [moe, dense, tied])
@pytest.mark.parametrize("made", ["frozen", "trained"])
def test_the_master_of_a_frozen_weight_is_frozen_until_it_is_not(make: Any, made: str) -> None:
    """Whether it was made before or after the freeze; also of a weight that is assigned or copied meanwhile."""
    first: Any = stored(make)
    weights = lambda model: [m.weight for m in model.modules() if stored_in(m) is not None]  # noqa: E731
    if made == "trained":
        fo.masters(first)
    for weight in weights(first):
        weight.requires_grad_(False)
    fo.masters(first)
    assigned: Any = stored(make)
    for weight in weights(assigned):
        weight.requires_grad_(False)
    assigned.load_state_dict(first.state_dict(), assign=True)
    for model in (first, assigned, copy.deepcopy(first)):
        masters = fo.masters(model)
        optimizer = torch.optim.SGD(masters, lr=1.0)
        for frozen in (True, False):
            for weight in weights(model):
                weight.requires_grad_(not frozen)
            before = [m.detach().clone() for m in masters]
            with fo.recipe(RECIPE):
                model(tokens()).float().square().sum().backward()
            for module in model.modules():
                if (weight := stored_in(module)) is not None and weight.master is not None:
                    assert weight.carrier.grad is weight.master.grad
            optimizer.step()
            optimizer.zero_grad()
            own = {id(p) for p in model.parameters()}
            for master, old in zip(masters, before, strict=True):
                assert id(master) in own or torch.equal(master, old) is frozen
        for master in masters:  # by hand, which no thaw of its weight undoes
            master.requires_grad_(False)
        with fo.recipe(RECIPE):
            model(tokens())
        assert not any(master.requires_grad for master in fo.masters(model))


def test_weights_that_cannot_be_shared_are_refused() -> None:
    late: Any = stored(
        lambda: fo.Sequential(*[fo.ops.Linear(D, D, bias=False, dtype=BF16) for _ in "ab"])
    )
    late[1].weight = late[0].weight
    for call in (lambda: late(tokens()), lambda: fo.masters(late), late.state_dict):
        with (
            fo.recipe(RECIPE),
            pytest.raises(fo.FuseOpsError, match="tied or assigned after the scope"),
        ):
            call()
    with pytest.raises(fo.FuseOpsError, match="another scope"), fo.quantized_init(RECIPE):
        fo.ops.Linear(D, D, bias=False, dtype=BF16).weight = late[0].weight
    with pytest.raises(fo.FuseOpsError, match=r"weight of Embedding .*high precision"):
        with fo.quantized_init(RECIPE):
            embedding, head = nn.Embedding(256, D), fo.ops.Linear(D, 256)
            head.weight = embedding.weight


def test_an_op_with_a_hook_is_asked_about_its_weight_when_it_is_called() -> None:
    model = stored(dense)
    found = after(model)
    for fc in (model.fc1, model.fc2):
        fc.register_forward_hook(lambda *given: None)
    assert_equal(after(model), found)
    with pytest.raises(fo.FuseOpsError, match="multiplies it as high precision"):
        model(tokens())


def test_what_cannot_be_honoured_is_refused() -> None:
    model, x = stored(dense), tokens()
    with pytest.raises(fo.FuseOpsError, match="multiplies it as high precision"):
        model(x)
    with pytest.raises(fo.FuseOpsError, match="high precision"), fo.recipe(RECIPE), fo.reference():
        model(x)
    with pytest.raises(fo.FuseOpsError, match="e5m2"):
        with fo.recipe(fo.recipes.Float8BlockScaling(fwd=torch.float8_e5m2)):
            model(x)
    with fo.recipe(fo.recipes.Float8BlockScaling(backward="high_precision")):
        with pytest.raises(fo.FuseOpsError, match="in its backward in high precision"):
            model(x)
        with torch.no_grad():
            assert model(x).isfinite().all()
    with (
        pytest.raises(fo.FuseOpsError, match="squares of 128"),
        fo.quantized_init(fo.recipes.Float8CurrentScaling()),
    ):
        dense()
    with pytest.raises(fo.FuseOpsError, match="Parameter"), fo.quantized_init(RECIPE):
        fo.ops.GroupedLinear(2, 8, 8, packed=False)
    with fo.quantized_init(RECIPE):
        sums = fo.Sequential(fo.ops.GroupedLinear(2, 8, 8, accumulate_into_main_grad=True))
    with pytest.raises(fo.FuseOpsError, match="masters: 0 has accumulate_into_main_grad"):
        fo.masters(sums)
    model.fc1.weight.data = model.fc1.weight.data.clone()  # as a wrapper that shards does
    with pytest.raises(fo.FuseOpsError, match="as if it had values"), fo.recipe(RECIPE):
        model(x)
    bad = stored(dense).state_dict()
    bad["fc1.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match=r"weight_scale_inv has shape \(1, 1\)"):
        dense().load_state_dict(bad)


def test_a_report_calls_a_weight_in_fp8_a_parameter() -> None:
    model = stored(dense)
    with offload.to_host(min_bytes=1, root=model) as scope, fo.recipe(RECIPE):
        model(tokens())
    reasons = {e.reason for e in scope.report().entries if e.name.endswith(".weight")}
    assert reasons == {"parameter"}


VALUE_WRITES: dict[str, Any] = {
    "reset": lambda op: op.reset_parameters(),
    "init": lambda op: nn.init.xavier_uniform_(op.weight),
    "zeros": lambda op: nn.init.zeros_(op.weight),
    "data": lambda op: op.weight.data.normal_(),
    "zero data": lambda op: op.weight.data.zero_(),
    "copy": lambda op: op.weight.copy_(torch.ones(2 * F, D)),
    "item": lambda op: op.weight.__setitem__(0, 1.0),
    "operator": lambda op: op.weight.__imul__(2.0),
    "again a Parameter": lambda op: nn.Parameter(op.weight).zero_(),
    "foreach": lambda op: torch._foreach_zero_([op.weight]),
    "view": lambda op: op.weight[0].zero_(),
    "out": lambda op: nn.init.eye_(op.weight),
}
SEEN_AT_THE_NEXT_CALL = ("foreach", "view", "out")  # torch writes to the one value there is


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("write", VALUE_WRITES)
def test_who_writes_values_to_a_weight_in_fp8_is_told_what_to_do(write: str, copied: bool) -> None:
    model = stored(dense)
    fo.configure(model, recipe=RECIPE)
    model = pickle.loads(pickle.dumps(copy.deepcopy(model))) if copied else model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(tokens())
    fc1: Any = model.get_submodule("fc1")
    with (
        pytest.raises(fo.FuseOpsError, match=r"\(192, 160\) of Linear fc1.*fo\.masters"),
        torch.no_grad(),
    ):
        VALUE_WRITES[write](fc1)
        assert write in SEEN_AT_THE_NEXT_CALL
        model(tokens())
    assert_equal([*model.state_dict().values()], [*before.values()])
    model.to("cpu")  # which blanks the weight
    assert torch.equal(model(tokens()), expected)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("with_masters", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_of_what_holds_no_values_is_refused(
    copied: bool, with_masters: bool, options: dict[str, bool]
) -> None:
    """Where masters take the gradients it would pass their weights over, and train nothing, without a word."""
    model = stored(dense)
    model = copy.deepcopy(model) if copied else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0, **options)
    if with_masters:
        fo.masters(model)
    for frozen, refused in (("fc1", "1 weight"), ("fc2", None)):
        with fo.recipe(RECIPE):
            model(tokens()).float().square().sum().backward()
        model.get_submodule(frozen).requires_grad_(False).zero_grad()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        if refused:
            with pytest.raises(fo.FuseOpsError, match=rf"AdamW has {refused} .* fo.masters"):
                optimizer.step()
            assert_equal([*model.state_dict().values()], [*before.values()])
        else:
            optimizer.step()
            assert not torch.equal(model.state_dict()["norm.weight"], before["norm.weight"])


ZEROING: dict[str, Any] = {
    "none": lambda optimizer, model: optimizer.zero_grad(),
    "zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "data": lambda optimizer, model: [p.grad.data.zero_() for p in fo.masters(model)],
    "model": lambda optimizer, model: model.zero_grad(),
    "nothing": lambda optimizer, model: None,
}


@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("steps", [1, 2])
def test_zeroing_the_model_or_the_masters_zeroes_both(zero: str, steps: int) -> None:
    def micro_batches(model: nn.Module) -> None:
        for seed in range(2):
            with fo.recipe(RECIPE):
                model(tokens(seed)).float().square().mean().backward()

    model = stored(dense)
    optimizer = torch.optim.SGD(fo.masters(model), lr=1e-3)
    for _ in range(steps):
        micro_batches(model)
        optimizer.step()
        ZEROING[zero](optimizer, model)
        alone = copy.deepcopy(model)
        for mine, theirs in zip(fo.masters(alone), fo.masters(model), strict=True):
            mine.grad = theirs.grad.clone() if zero == "nothing" else None
        with fo.recipe(RECIPE), torch.no_grad():
            model(tokens())
        if zero in ("none", "model"):
            assert all(p.grad is None for p in (*model.parameters(), *fo.masters(model)))
        micro_batches(alone)
    micro_batches(model)
    assert_equal(*([p.grad for p in fo.masters(m)] for m in (model, alone)))


@pytest.mark.parametrize("zero", ZEROING)
def test_zeroing_between_a_forward_and_its_backward_zeroes_both(zero: str) -> None:
    def loss(model: nn.Module, seed: int) -> Tensor:
        with fo.recipe(RECIPE):
            return model(tokens(seed)).float().square().mean()

    model = stored(dense)
    optimizer, alone = torch.optim.SGD(fo.masters(model), lr=1e-3), copy.deepcopy(model)
    loss(model, 0).backward()
    late = loss(model, 1)
    ZEROING[zero](optimizer, model)
    late.backward()
    for seed in range(zero != "nothing", 2):
        loss(alone, seed).backward()
    assert_equal(*([p.grad for p in fo.masters(m)] for m in (model, alone)))


@pytest.mark.parametrize("first", ["masters", "backward"])
def test_a_weight_and_its_master_have_one_gradient(first: str) -> None:
    """Clipped, or replaced, in either; whether the master was made before the backward or after it."""
    model = stored(dense)
    weights = fo.masters(model) if first == "masters" else None
    with fo.recipe(RECIPE):
        model(tokens()).float().square().mean().backward()
    masters = weights or fo.masters(model)
    pairs = [*zip(model.parameters(), masters, strict=True)]
    total = torch.nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * total.item())
    assert torch.equal(norm, total)
    for weight, master in pairs:
        assert weight.grad is master.grad and master.grad is not None
    expected = [m.detach() - 2 * m.grad for m in masters]  # type: ignore[operator]
    masters[0].grad = 2 * masters[0].grad  # type: ignore[operator]
    pairs[-1][0].grad = 2 * pairs[-1][0].grad  # type: ignore[operator]
    for master in masters[1:-1]:
        master.grad.mul_(2)  # type: ignore[union-attr]
    torch.optim.SGD(masters, lr=1.0).step()
    assert_equal([m.detach() for m in masters], expected)


def test_a_gradient_may_be_given_to_the_master_of_a_frozen_weight() -> None:
    model = stored(dense).requires_grad_(False)
    master = fo.masters(model)[-1]
    master.grad, expected = torch.ones_like(master), master.detach() - 1
    torch.optim.SGD([master], lr=1.0).step()
    assert torch.equal(master.detach(), expected)


def test_a_model_that_another_thread_makes_meanwhile_is_its_own() -> None:
    made: list[nn.Module] = []
    with fo.quantized_init(RECIPE):
        thread = threading.Thread(target=lambda: made.append(dense()))
        thread.start()
        thread.join()
        mine = dense()
    stores = [[stored_in(op) is not None for op in m.children()] for m in (mine, *made)]
    assert any(stores[0]) and not any(stores[1])


def test_compiled_code_refuses_codes_and_says_what_to_do() -> None:
    model = torch.compile(stored(dense), backend="eager")
    with fo.recipe(RECIPE), pytest.raises(Exception, match=r"Compile around the op .* or make it"):
        model(tokens())


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("copied", [False, True], ids=["", "unpickled"])
@pytest.mark.usefixtures("one_rank")
def test_masters_whose_gradients_no_rank_would_reduce_are_refused(copied: bool) -> None:
    """Gradients are moved to masters before DistributedDataParallel could reduce them."""
    for late, init_sync in itertools.product((False, True), (False, True)):
        model, x = stored(dense), tokens()
        model = pickle.loads(pickle.dumps(model)) if copied else model
        if not late:
            fo.masters(model)
        with pytest.raises(
            fo.FuseOpsError, match=r"2 weights .* 'fc1.weight', .* fo.masters\(model\)"
        ):
            DDP(model, init_sync=init_sync)
        model.requires_grad_(not late)  # what is frozen when it is wrapped is not reduced later
        names = ["fc2.weight"] if late else ["fc1.weight", "fc2.weight"]
        model.get_submodule("norm").requires_grad_()
        DDP._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapper = DDP(model, init_sync=init_sync)
        with fo.recipe(RECIPE):
            wrapper(x).sum().backward()
            if late:
                model.requires_grad_()
                fo.masters(model)
                with pytest.raises(fo.FuseOpsError, match="DistributedDataParallel"):
                    wrapper(x)


@pytest.mark.usefixtures("one_rank")
def test_frozen_weights_in_fp8_are_wrapped_as_others_are() -> None:
    found = []
    for wrap in (nn.Identity, DDP):
        model = stored(dense)
        for fc in ("fc1", "fc2"):
            model.get_submodule(fc).weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        found.append(after(wrap(model), lambda m, x: m(x)) if wrap is DDP else after(model))
    assert_equal(*found)


def test_casts_and_devices_leave_the_codes_alone() -> None:
    model = stored(dense)
    codes = {k: v.clone() for k, v in model.state_dict().items() if "fc" in k and "bias" not in k}
    model.float().to("cpu").to(BF16)
    for key, t in codes.items():
        assert torch.equal(model.state_dict()[key].view(torch.uint8), t.view(torch.uint8))
    assert_equal(after(model), after(dense()))


def replaced(master: nn.Parameter) -> None:
    master.data = master.data * 3  # which moves no version


WRITES: dict[str, Any] = {
    "in place": lambda master: master.mul_(3),
    "foreach": lambda master: torch._foreach_mul_([master], 3),
    "other memory": replaced,
}


@pytest.mark.parametrize("write", WRITES)
def test_codes_follow_a_master_however_it_is_written(write: str) -> None:
    """An average of weights comes and goes: other values in the masters for an evaluation, then those before."""
    model, expected, x = stored(dense), stored(dense), tokens()
    with torch.no_grad():
        for master in fo.masters(expected):
            master.mul_(3)
    masters = fo.masters(model)
    for _ in range(2):
        with fo.recipe(RECIPE), torch.no_grad():
            before, kept = model(x), [(m, m.data, m.clone()) for m in masters]
            for master in masters:
                WRITES[write](master)
            assert torch.equal(model(x), expected(x))
            for master, memory, values in kept:
                master.data = memory
                master.copy_(values)
            assert torch.equal(model(x), before)


LOOKS = {
    "explain": fo.explain,
    "plan": lambda model, x: offload.plan(model, x, layers="0"),
    "record": lambda model, x: offload.plan(model, x, layers="0", record=True),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_may_be_looked_at_between_steps(look: str) -> None:
    """Codes follow their masters by the next step, and masters get the gradients of steps alone."""
    found = []
    for looks in (False, True):
        model = nn.Sequential(stored(dense), nn.Tanh())
        masters = fo.masters(model)
        optimizer = torch.optim.SGD(masters, lr=0.1)
        with fo.recipe(RECIPE):
            for step in range(2):
                model(tokens(step)).float().square().sum().backward()
                if looks and step:
                    LOOKS[look](model, tokens(7))
                optimizer.step()
                if looks and not step:
                    LOOKS[look](model, tokens(7))
        found.append([*masters, *[m.grad for m in masters]])
    assert_equal(*found)


def forward_again(model: nn.Module) -> None:
    with fo.recipe(RECIPE), torch.no_grad():
        model(tokens(7))


BETWEEN: dict[str, Any] = {
    "nothing": lambda model: None,
    "a forward": forward_again,
    "weights_changed": fo.weights_changed,
    "state_dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("then", BETWEEN)
@pytest.mark.parametrize("scope", [contextlib.nullcontext, offload.keep])
def test_a_master_written_by_hand_before_the_backward_changes_no_gradient(
    then: str, scope: Any
) -> None:
    """The backward is that of the codes that its forward read, or, where those are gone, an error."""

    def gradients(written: bool) -> list[Any]:
        model, x = stored(dense), tokens()
        masters = fo.masters(model)
        forward_again(model)
        with fo.recipe(RECIPE):
            with scope():
                y = model(x).float().square().sum()
            if written:
                with torch.no_grad():
                    masters[1].mul_(2)
                BETWEEN[then](model)
            y.backward()
        return [x.grad, *[m.grad for m in masters]]

    if then == "nothing":
        assert_equal(gradients(True), gradients(False))
    else:
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            gradients(True)
