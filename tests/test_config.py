"""Configuration: process, model, scopes, environment, logs, threads, and recomputation under them."""

import copy
import gc
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from norm_linear import NORM_LINEAR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.errors import FuseOpsError
from fuseops.ops import Bias, Dropout, Linear, RMSNorm, SiLU, scopes
from fuseops.rules.builtin_rules import BUILTIN_RULES

ROOT = Path(__file__).resolve().parent.parent
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith("FUSEOPS_")},
    "PYTHONPATH": str(ROOT),
}
FP8 = fo.recipes.Float8CurrentScaling()


@pytest.fixture(autouse=True)
def no_process_settings() -> None:
    scopes.process.layer, scopes.process.token = None, 0


def block(width: int = 4) -> fo.Sequential:
    torch.manual_seed(2)
    return fo.Sequential(Linear(width, width), SiLU())


def data() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def fired(seq: nn.Module, x: Tensor) -> set[str]:
    """The rules that fire in the forward of one call."""
    plans: list = []
    with scopes.watch_plans(plans.append):
        seq(x)
    return {span.rule for p in plans for span in p.forward if span.rule}


class Twice(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return 2 * x


class FusedTwice(fo.FusedOp):
    def fwd(self, x: Tensor, t: tuple, calls: tuple) -> fo.Out:
        return fo.Out(2 * x, ((x,),))


TWICE = fo.Rule("twice", (Twice,), FusedTwice)
NEVER = fo.Rule("never", (Twice,), FusedTwice, when=(lambda ops, c: "op 3 is why it ends",))


# --- who decides ------------------------------------------------------------------------------


def test_a_rule_fires_where_nothing_is_said() -> None:
    assert fired(block(), data()) == {"linear_act"}


@pytest.mark.parametrize(
    "said", [{"fusion": False}, {"disable": ["linear_act"]}, {"disable": "linear_act"}]
)
def test_the_process_a_model_and_a_scope_can_each_say_it(said: dict) -> None:
    seq, other = block(), block()
    with fo.fusion(*([False] if "fusion" in said else []), disable=said.get("disable", ())):
        assert fired(seq, data()) == set()
    fo.configure(seq, **said)
    assert fired(seq, data()) == set() and fired(other, data()) == {"linear_act"}
    fo.configure(**said)
    assert fired(other, data()) == set()


def test_a_model_overrides_the_process_and_a_scope_both() -> None:
    seq = block()
    fo.configure(fusion=False)
    fo.configure(seq, fusion=True)
    assert fired(seq, data()) == {"linear_act"} and fired(block(), data()) == set()
    with fo.fusion(False):
        assert fired(seq, data()) == set()
        with fo.fusion(True):
            assert fired(block(), data()) == {"linear_act"}


def test_a_later_configure_replaces_what_it_names_and_keeps_the_rest() -> None:
    seq = fo.Sequential(Twice(), Linear(4, 4), SiLU())
    fo.configure(seq, rules=[TWICE], disable=["linear_act"])
    fo.configure(seq, disable=[])
    assert fired(seq, data()) == {"twice", "linear_act"}


def test_disabling_one_rule_in_a_scope_does_not_switch_fusion_on() -> None:
    seq = fo.Sequential(Twice(), Linear(4, 4), SiLU())
    fo.configure(seq, rules=[TWICE], fusion=False)
    with fo.fusion(disable=["twice"]):
        assert fired(seq, data()) == set()
    with fo.fusion():
        assert fired(seq, data()) == {"twice", "linear_act"}


def test_disabled_names_add_up_over_scopes() -> None:
    seq = fo.Sequential(Twice(), Linear(4, 4), SiLU())
    with fo.rules(TWICE), fo.fusion(disable=["twice"]), fo.fusion(disable=["linear_act"]):
        assert fired(seq, data()) == set()


def test_configure_reaches_every_sequential_and_op_of_a_model() -> None:
    model = nn.ModuleDict(
        {"a": block(), "b": nn.Sequential(fo.Sequential(block())), "c": Linear(4, 4)}
    )
    fo.configure(model, recipe=FP8)
    x = data()
    exact = nn.functional.linear(x, model["c"].weight, model["c"].bias)
    assert not torch.equal(model["c"](x), exact)
    with fo.recipe(None):
        assert torch.equal(model["c"](x), exact)


@pytest.mark.parametrize("derive", [copy.deepcopy, lambda s: s[:], lambda s: s + fo.Sequential()])
def test_configuration_survives_copies_and_slices(derive: Callable) -> None:
    seq = block()
    fo.configure(seq, fusion=False)
    assert fired(derive(seq), data()) == set()


DERIVED = [
    copy.copy,
    copy.deepcopy,
    lambda seq: seq[:],
    lambda seq: pickle.loads(pickle.dumps(seq)),
]


@pytest.mark.parametrize("derive", DERIVED, ids=["copy", "deepcopy", "slice", "pickle"])
@pytest.mark.parametrize("runs", [False, True])
def test_settings_live_as_long_as_a_model_that_has_them(derive: Callable, runs: bool) -> None:
    """Their recipe may hold what is large: a function of `ByRole`, say, the model."""
    gc.collect()
    before = {*scopes._by_token}
    seq = block()
    fo.configure(seq, disable=["linear_act"], prefer="memory", recipe=FP8)
    fo.configure(seq, recipe=None)
    if runs:
        seq(data()).sum().backward()
    gc.collect()
    (token,) = {*scopes._by_token} - before
    made = derive(seq)
    del seq
    gc.collect()
    assert made._settings == token and scopes.resolve(token).prefer == "memory"
    assert fired(made, data()) == set()
    del made
    gc.collect()
    assert {*scopes._by_token} == before


def test_a_pickle_carries_settings_and_not_their_numbers(tmp_path: Path) -> None:
    seq = fo.Sequential(fo.Sequential(Linear(4, 4)), Linear(4, 4))
    with fo.rules(TWICE):  # settings of this process that another one never saw
        fo.configure(seq, recipe=FP8, disable=["linear_act"])
    code = (
        "import pickle, sys, torch, fuseops as fo\n"
        "from fuseops.ops import scopes\n"
        "seq = pickle.load(open(sys.argv[1], 'rb'))\n"
        "for m in (seq, *seq, seq[0][0]): print(scopes.resolve(m.__dict__['_settings']).recipe)\n"
        "print(scopes.resolve(seq.__dict__['_settings']).disable)"
    )
    (file := tmp_path / "pickle").write_bytes(pickle.dumps(seq))
    out = fresh.run("-c", code, str(file), env=ENV)
    assert out.stdout.split("\n") == [*[str(FP8)] * 4, "frozenset({'linear_act'})", ""], out.stderr


def test_a_pickle_holds_a_rule_by_import_path_or_raises() -> None:
    seq = fo.Sequential(Twice())
    fo.configure(seq, rules=[TWICE])
    twin = pickle.loads(pickle.dumps(seq))
    assert fired(twin, data()) == {"twice"}
    assert scopes.resolve(twin.__dict__["_settings"]).rules[0] is TWICE
    fo.configure(seq, rules=[fo.Rule("local", (Twice,), FusedTwice, when=(lambda ops, c: None,))])
    assert fired(copy.deepcopy(seq), data()) == {"local"}
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(seq)


@pytest.mark.parametrize(
    "said",
    [
        {"fusion": 1},
        {"fusion": "off"},
        {"recipe": "fp8"},
        {"rules": ["linear_act"]},
        {"rules": [Linear]},
        {"rules": 3},
        {"rules": TWICE},
        {"disable": 3},
        {"disable": [3]},
        {"prefer": "bytes"},
        {"prefer": None},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(said: dict) -> None:
    with pytest.raises(
        fo.FuseOpsError, match=rf"fo\.configure\({next(iter(said))}=\.\.\.\) expects"
    ):
        fo.configure(block(), **said)


@pytest.mark.parametrize("what", ["strict", "disable"])
def test_names_of_rules_are_names(what: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=rf"fo\.fusion\({what}=.*names of rules, got 3"):
        with fo.fusion(**{what: 3}):
            pass


def test_scopes_end_with_an_exception_too() -> None:
    with pytest.raises(KeyError), fo.fusion(False), fo.rules(TWICE):
        raise KeyError
    with pytest.raises(KeyError), fo.fusion(strict=["linear_act"]):
        raise KeyError
    assert scopes.current().token == 0 and scopes.current().watchers == []


# --- names and strictness ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["disable", "strict", "process", "model"])
def test_an_unknown_rule_name_raises_and_lists_the_known_ones(how: str) -> None:
    seq = block()
    seq(data())
    give: Callable[[list[str]], object] = {
        "model": lambda names: fo.configure(seq, disable=names),
        "process": lambda names: fo.configure(disable=names),
    }.get(how, lambda names: fo.fusion(**{how: names}))
    with pytest.raises(fo.FuseOpsError, match=r"linear_atc.*linear_act"):
        give(["linear_atc"])
    assert fired(seq, data()) == {"linear_act"}
    not_in_force = pytest.raises(
        fo.FuseOpsError, match=r"no rule is called \['twice'\].*linear_act"
    )
    scope: Any = give([TWICE.name])  # there is such a rule, which may come into force yet
    with not_in_force, scope or nullcontext():
        seq(data())
    if how != "strict":
        with give([TWICE.name]) or nullcontext(), fo.rules(TWICE):  # type: ignore[attr-defined]
            assert fired(seq, data()) == {"linear_act"}


def test_a_rule_may_be_named_in_the_call_that_makes_it_known() -> None:
    seq = fo.Sequential(Twice())
    own = fo.Rule("named at once", (Twice,), FusedTwice)
    fo.configure(seq, rules=[own], disable=[own.name])
    assert fired(seq, data()) == set()


def two_biases() -> fo.Sequential:
    return fo.Sequential(Linear(4, 4), Bias(4), SiLU())


def test_strict_raises_at_once_on_a_condition_miss() -> None:
    with fo.fusion(strict=["linear_act"]):
        with pytest.raises(fo.FusionMissError, match=r"linear_act.*bias of its own"):
            two_biases()(data())
        block()(data())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strict", [True, "linear_act", ["linear_act"]])
def test_a_strict_model_raises_as_in_a_strict_scope(strict: Any, reentrant: bool) -> None:
    seq, good = two_biases(), block()
    for model in (seq, good):
        fo.configure(model, strict=strict)
    recomputing(good, data(), reentrant).sum().backward()
    with pytest.raises(fo.FusionMissError, match=r"linear_act.*bias of its own"):
        seq(data())
    two_biases()(data())  # another model
    fo.configure(seq, strict=False)
    seq(data())
    with pytest.raises(fo.FuseOpsError, match="linear_atc"):
        fo.configure(good, strict=["linear_atc"])
        good(data())
    with pytest.raises(
        fo.FuseOpsError, match=r"strict_recipe=\.\.\.\) expects True or False, got 'fc'"
    ):
        fo.configure(good, strict_recipe="fc")  # type: ignore[arg-type]


def test_strict_raises_again_on_the_next_call() -> None:
    seq = two_biases()
    seq(data())
    with fo.fusion(strict=["linear_act"]):
        for _ in range(2):
            with pytest.raises(fo.FusionMissError):
                seq(data())
        block()(data())


def test_strict_raises_at_once_on_an_overlap() -> None:
    seq = fo.Sequential(RMSNorm(4), Linear(4, 4), SiLU())
    fo.configure(seq, rules=[NORM_LINEAR])
    assert fired(seq, data()) == {"user_norm_linear"}
    with pytest.raises(fo.FusionMissError, match=r"linear_act.*overlaps.*norm_linear"):
        with fo.fusion(strict=["linear_act"]):
            seq(data())


@pytest.mark.parametrize("scope", [{"enabled": False}, {"disable": ["linear_act"]}])
def test_strict_raises_where_the_rule_is_switched_off(scope: dict) -> None:
    with pytest.raises(fo.FusionMissError, match="linear_act"):
        with fo.fusion(strict=["linear_act"]), fo.fusion(**scope):
            block()(data())


def test_strict_protects_only_what_it_names() -> None:
    with fo.rules(NORM_LINEAR), fo.fusion(strict=["user_norm_linear"]):
        two_biases()(data())
        fo.Sequential(RMSNorm(4), Linear(4, 4))(data())


def test_leaving_a_strict_scope_without_the_rule_raises_with_what_came_nearest() -> None:
    with pytest.raises(fo.FusionMissError, match=r"linear_act.*Dropout"):
        with fo.fusion(strict=["linear_act"]):
            fo.Sequential(Linear(4, 4), Dropout(0.5), SiLU())(data())
    with pytest.raises(fo.FusionMissError, match=r"linear_act.*never fired"):
        with fo.fusion(strict=["linear_act"]):
            pass


def test_leaving_a_strict_scope_after_the_rule_fired_is_quiet_with_a_cached_plan_too() -> None:
    seq = block()
    for _ in range(2):
        with fo.fusion(strict="linear_act"):
            seq(data())


def test_an_error_inside_a_strict_scope_is_not_replaced() -> None:
    with pytest.raises(KeyError), fo.fusion(strict=["linear_act"]):
        raise KeyError


def test_strict_true_raises_on_condition_misses_and_not_on_overlaps_or_near_misses() -> None:
    with fo.fusion(strict=True):
        block()(data())
        fo.Sequential(RMSNorm(4), Linear(4, 4), SiLU())(data())
        fo.Sequential(Linear(4, 4), Dropout(0.5), SiLU())(data())
        with pytest.raises(fo.FusionMissError, match="linear_act"):
            two_biases()(data())


@pytest.mark.parametrize("strict", [True, ["never"]])
def test_strict_does_not_read_the_wording_of_a_reason(strict: bool | list) -> None:
    with pytest.raises(fo.FusionMissError, match="op 3 is why it ends"):
        with fo.rules(NEVER), fo.fusion(strict=strict):
            fo.Sequential(Twice())(data())


# --- environment ------------------------------------------------------------------------------

PROBE = """
import torch, fuseops as fo
seq = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())
from fuseops.ops import scopes
plans = []
scopes.current().watchers.append(plans.append)
seq(torch.ones(2, 4)); seq(torch.ones(3, 4))
print(sorted({s.rule for p in plans for s in p.forward if s.rule}))
"""


@pytest.mark.parametrize(
    ("environ", "rules", "error"),
    [
        ({}, "['linear_act']", ""),
        ({"FUSEOPS_FUSION": "0"}, "[]", ""),
        ({"FUSEOPS_DISABLE": "add_norm, linear_act"}, "[]", ""),
        ({"FUSEOPS_DISABLE": "nonsense"}, "", "nonsense"),
        ({"FUSEOPS_FUSION": "off"}, "", "FUSEOPS_FUSION"),
        ({"FUSEOPS_LOG": "loud"}, "", "FUSEOPS_LOG"),
        ({"FUSEOPS_NVTX": "true"}, "", "FUSEOPS_NVTX"),
    ],
)
def test_environment_variables_set_the_process_default(
    environ: dict, rules: str, error: str
) -> None:
    out = fresh.run("-c", PROBE, env=ENV | environ)
    assert out.stdout.strip() == rules
    assert error in out.stderr and bool(error) == bool(out.stderr), out.stderr


def test_fuseops_log_prints_one_line_per_new_plan() -> None:
    err = fresh.run("-c", PROBE, env=ENV | {"FUSEOPS_LOG": "info"}).stderr
    assert err.count("\n") == 1 and "linear_act" in err, err


# --- loggers ----------------------------------------------------------------------------------


def test_one_line_per_new_plan(caplog: pytest.LogCaptureFixture) -> None:
    seq = block()
    with caplog.at_level(logging.INFO, "fuseops.fusion"):
        for rows in (1, 2, 3):
            seq(torch.ones(rows, 4))
        assert [r.name for r in caplog.records] == ["fuseops.fusion"]
        assert "linear_act" in caplog.text
        with fo.fusion(False):
            seq(torch.ones(1, 4))
        assert len(caplog.records) == 2


# --- threads ----------------------------------------------------------------------------------


def in_thread(f: Callable) -> object:
    result: list = []
    thread = threading.Thread(target=lambda: result.append(f()))
    thread.start()
    thread.join()
    return result[0]


def test_scopes_end_at_the_thread_and_configure_does_not() -> None:
    seq = block()
    with fo.fusion(False):
        assert in_thread(lambda: fired(seq, data())) == {"linear_act"}
    fo.configure(seq, fusion=False)
    assert in_thread(lambda: fired(seq, data())) == set()
    fo.configure(fusion=False)
    assert in_thread(lambda: fired(block(), data())) == set()


def test_a_strict_scope_does_not_watch_other_threads() -> None:
    with pytest.raises(fo.FusionMissError, match="never fired"):
        with fo.fusion(strict=["linear_act"]):
            in_thread(lambda: block()(data()))


def test_threads_may_share_a_sequential() -> None:
    seq, x = block(), data()
    expected, results = seq(x), []

    def work() -> None:
        for rows in range(1, 20):
            with fo.fusion(rows % 2 == 0):
                results.append(torch.allclose(seq(x.repeat(rows, 1))[-3:], expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4 * 19 and all(results)


# --- recomputation ----------------------------------------------------------------------------

SCOPES = [
    lambda: fo.fusion(False),
    lambda: fo.fusion(disable=["linear_act"]),
    lambda: fo.rules(TWICE),
    lambda: fo.recipe(FP8),
    lambda: fo.reference(),
]
FIELDS = ["fusion", "disable", "rules", "recipe", "reference"]


def recomputing(seq: nn.Module, x: Tensor, reentrant: bool, **options: object) -> Tensor:
    return checkpoint(seq, x, use_reentrant=reentrant, **options)


def trained(seq: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(p.grad for p in seq.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("scope", "field"), list(zip(SCOPES, FIELDS, strict=True)), ids=FIELDS)
def test_a_backward_outside_the_scopes_of_its_forward_is_refused_by_name(
    scope: Callable[[], AbstractContextManager], field: str, reentrant: bool
) -> None:
    seq, x = block(), data()
    with scope():
        y = recomputing(seq, x, reentrant)
    with pytest.raises(
        fo.FuseOpsError, match=rf"Sequential.*recomputed.*{field}.*checkpoint_contexts"
    ):
        y.sum().backward()


def test_the_refusal_names_rules_and_no_more_of_them() -> None:
    seq, x = block(), data()
    with fo.rules(TWICE), fo.fusion(disable=["linear_act"]):
        y = recomputing(seq, x, False)
    said = rf"disable was \['linear_act'\], is \[\]; rules was \['{TWICE.name}'\], is \[\]\."
    with pytest.raises(fo.FuseOpsError, match=said):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("scope", "field"), list(zip(SCOPES, FIELDS, strict=True)), ids=FIELDS)
def test_a_backward_inside_scopes_that_its_forward_was_not_in_is_refused(
    scope: Callable[[], AbstractContextManager], field: str, reentrant: bool
) -> None:
    seq, x = block(), data()
    y = recomputing(seq, x, reentrant)
    with pytest.raises(fo.FuseOpsError, match=f"recomputed.*{field}"), scope():
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scope", SCOPES, ids=FIELDS)
def test_a_backward_inside_the_scopes_of_its_forward_is_the_plain_one(
    scope: Callable[[], AbstractContextManager], reentrant: bool
) -> None:
    seq, x = block(), data()
    with scope():
        expected = torch.autograd.grad(seq(x).sum(), [x, *seq.parameters()])
        recomputing(seq, x, reentrant).sum().backward()
    torch.testing.assert_close(trained(seq, x), list(expected))


@pytest.mark.parametrize("scope", SCOPES, ids=FIELDS)
def test_checkpoint_contexts_carry_the_scopes(scope: Callable[[], AbstractContextManager]) -> None:
    seq, x = block(), data()
    with scope():
        expected = torch.autograd.grad(seq(x).sum(), [x, *seq.parameters()])
        y = recomputing(seq, x, False, context_fn=fo.checkpoint_contexts)
    with fo.fusion(True):
        y.sum().backward()
    torch.testing.assert_close(trained(seq, x), list(expected))
    assert scopes.current().token == 0


def test_checkpoint_contexts_hold_each_time_that_the_graph_is_read() -> None:
    seq, x = block(), data()
    with fo.recipe(FP8):
        expected = torch.autograd.grad(seq(x).sum(), [x, *seq.parameters()])
        y = recomputing(seq, x, False, context_fn=fo.checkpoint_contexts)
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    torch.testing.assert_close(trained(seq, x), [3 * g for g in expected])


def test_checkpoint_contexts_carry_each_forwards_own_scopes() -> None:
    seq, x = block(), data()
    with fo.recipe(FP8):
        y = recomputing(seq, x, False, context_fn=fo.checkpoint_contexts)
    z = recomputing(seq, y, False, context_fn=fo.checkpoint_contexts)
    with fo.recipe(FP8):
        h = seq(x)
    expected = torch.autograd.grad(seq(h).sum(), [x, *seq.parameters()])
    z.sum().backward()
    torch.testing.assert_close(trained(seq, x), list(expected))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_configure_says_holds_in_recomputation(reentrant: bool) -> None:
    seq, x = block(), data()
    fo.configure(seq, recipe=FP8)
    expected = torch.autograd.grad(seq(x).sum(), [x, *seq.parameters()])
    recomputing(seq, x, reentrant).sum().backward()
    torch.testing.assert_close(trained(seq, x), list(expected))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whose", ["model", "process"])
def test_configure_between_forward_and_backward_is_refused(whose: str, reentrant: bool) -> None:
    seq, x = block(), data()
    y = recomputing(seq, x, reentrant)
    fo.configure(*([seq] if whose == "model" else []), fusion=False)
    with pytest.raises(fo.FuseOpsError, match=r"fusion was True, is False"):
        y.sum().backward()


def test_the_refusal_names_the_module_path_once_the_root_is_known() -> None:
    model, x = nn.ModuleDict({"mlp": block()}), data()
    fo.configure(model)
    with fo.fusion(False):
        y = recomputing(model["mlp"], x, False)
    with pytest.raises(fo.FuseOpsError, match=r"'mlp'"):
        y.sum().backward()


def test_one_op_alone_is_refused_too() -> None:
    op, x = Linear(4, 4), data()
    with fo.recipe(FP8):
        y = recomputing(op, x, False)
    with pytest.raises(fo.FuseOpsError, match=r"Linear.*recipe"):
        y.sum().backward()


def test_checkpoint_contexts_do_not_hide_a_configure_in_between() -> None:
    seq, x = block(), data()
    y = recomputing(seq, x, False, context_fn=fo.checkpoint_contexts)
    fo.configure(seq, fusion=False)
    with pytest.raises(fo.FuseOpsError, match="fusion was True, is False"):
        y.sum().backward()


def test_settings_that_say_the_same_are_the_same() -> None:
    seq, x = block(), data()
    with fo.fusion(True), fo.rules():
        y = recomputing(seq, x, False)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_recomputes_its_own_mask(reentrant: bool) -> None:
    seq, x = fo.Sequential(Linear(4, 4), Dropout(0.5)), data()
    torch.manual_seed(5)
    expected = torch.autograd.grad(seq(x).sum(), [x])
    torch.manual_seed(5)
    recomputing(seq, x, reentrant).sum().backward()
    torch.testing.assert_close([x.grad], list(expected))


def test_every_built_in_rule_can_be_named() -> None:
    for rule in BUILTIN_RULES:
        with fo.fusion(disable=[rule.name]):
            block()(data())


@pytest.mark.parametrize("call", [
    lambda model: fo.configure(model, fusion=False), fo.explain, fo.plans,
    fo.testing.assert_fused_matches_unfused, fo.testing.bisect,
])  # fmt: skip
def test_what_is_no_module_is_refused(call: Any) -> None:
    with pytest.raises(fo.FuseOpsError, match=r"expects an nn\.Module, got str"):
        call("model")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_scopes_left_in_any_order_leave_nothing_said(order: tuple[int, ...]) -> None:
    made = [fo.recipe(FP8), fo.fusion(False), offload.recompute()]
    for scope in made:
        scope.__enter__()
    refused = 0
    for place in order:
        try:
            made[place].__exit__(None, None, None)
        except FuseOpsError as error:
            refused += "left out of order" in str(error)
    assert scopes.current().layer is None and scopes.current().token == 0
    assert (refused == 0) == (order == (2, 1, 0))


def test_a_scope_that_two_threads_share_ends_in_each_by_itself() -> None:
    shared, entered, leave = fo.recipe(FP8), threading.Event(), threading.Event()
    left: list[Any] = []

    def other() -> None:
        with shared:
            entered.set()
            leave.wait(9)
        left.append(scopes.current().layer)

    thread = threading.Thread(target=other, daemon=True)
    with fo.fusion(False):
        before = scopes.current().layer
        with shared:
            thread.start()
            entered.wait()
        assert scopes.current().layer is before
        leave.set()
        thread.join()
    assert left == [None]
