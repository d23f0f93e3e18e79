"""Side inputs and outputs: who reads, who writes, what the caller passes, and fo.Routing."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops import Add, GroupedLinear, Linear, ScaledSwiGLU, SiLU, Tap


def experts(E: int = 3, D: int = 4, F: int = 6) -> fo.Sequential:
    torch.manual_seed(1)
    return fo.Sequential(
        {
            "fc1": GroupedLinear(E, D, 2 * F, bias=False),
            "act": ScaledSwiGLU(),
            "fc2": GroupedLinear(E, F, D, bias=False),
        }
    )


def routed(counts: tuple[int, ...] = (2, 0, 3)) -> tuple[Tensor, fo.Routing]:
    rows = sum(counts)
    probs = torch.rand(rows, requires_grad=True)
    return torch.randn(rows, 4, requires_grad=True), fo.Routing.from_counts(list(counts), probs)


class Weigh(fo.Op):
    """y = x * w, w a side input: an op that is only a fwd."""

    reads = ("w",)

    def fwd(self, x: Tensor, *, w: Tensor) -> Tensor:
        return x * w


class Publish(fo.Op):
    """y = 2x, and the square of x under `name`: level 1, with a side output."""

    def __init__(self, name: str = "aux") -> None:
        super().__init__()
        self.writes = (name,)

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(2 * x, side={self.writes[0]: x.square()})


class CountsSaved(NamedTuple):
    x: Tensor | None


class Counts(fo.Op[CountsSaved]):
    """y = x, and an integer side tensor."""

    writes = ("counts",)
    saves_for = {"x": ()}

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(x * 1, CountsSaved(x), {"counts": (x > 0).sum(0)})

    def bwd(self, saved: CountsSaved, dy: Tensor, *, dside: dict) -> fo.Grads:
        assert dside["counts"] is None
        return fo.Grads(dy)


# --- what the caller passes -------------------------------------------------------------------


def test_a_routing_is_its_fields_by_name() -> None:
    seq, (x, routing) = experts(), routed()
    assert torch.equal(seq(x, routing), seq(x, offs=routing.offs, probs=routing.probs))
    assert torch.equal(seq(x, fo.Routing(routing.offs), probs=routing.probs), seq(x, routing))


def test_what_a_routing_holds_beyond_what_is_read_is_ignored() -> None:
    x, routing = routed()
    assert Linear(4, 4)(x, routing).shape == fo.Sequential(Linear(4, 4))(x, routing).shape


def test_it_says_what_it_reads() -> None:
    assert set(experts().reads) == {"offs", "probs"}
    assert fo.Sequential(Linear(4, 4), fo.Residual(Linear(4, 4))).reads == ()


@pytest.mark.parametrize("given", [{}, {"offs": torch.tensor([5], dtype=torch.int32)}])
def test_a_missing_side_input_lists_what_is_read(given: dict) -> None:
    with pytest.raises(fo.SideInputError, match=r"needs.*'probs'.*reads.*'offs', 'probs'"):
        experts()(torch.randn(5, 4), **given)


def test_a_missing_side_tensor_that_no_routing_has_is_written_by_a_tap() -> None:
    with pytest.raises(fo.SideInputError, match=r"needs side inputs \['skip'\].*Tap\('skip'\)"):
        fo.Sequential(SiLU(), Add("skip"))(torch.ones(2))


def test_an_unknown_side_input_lists_what_is_read() -> None:
    x, routing = routed()
    with pytest.raises(fo.SideInputError, match=r"'prob'.*reads \['offs', 'probs'\]"):
        experts()(x, routing, prob=routing.probs)


@pytest.mark.parametrize("value", [[2, 0, 3], (2, 0, 3), 5, 1.0, None])
def test_a_side_input_that_is_no_tensor_names_from_counts(value: object) -> None:
    x, routing = routed()
    with pytest.raises(fo.SideInputError, match=r"'offs'.*Routing\.from_counts") as caught:
        experts()(x, offs=value, probs=routing.probs)
    assert type(value).__name__ in str(caught.value) and "['offs', 'probs']" in str(caught.value)


@pytest.mark.parametrize("position", [[2, 0, 3], 5, torch.ones(3, dtype=torch.int32)])
def test_only_a_routing_goes_by_position(position: object) -> None:
    x, _ = routed()
    with pytest.raises(fo.SideInputError, match=r"Routing.*\['offs', 'probs'\]"):
        experts()(x, position)


def test_a_name_given_twice_is_an_error() -> None:
    x, routing = routed()
    with pytest.raises(fo.SideInputError, match="probs"):
        experts()(x, routing, probs=routing.probs)


def test_side_input_errors_are_type_errors_and_fuseops_errors() -> None:
    assert issubclass(fo.SideInputError, TypeError) and issubclass(
        fo.SideInputError, fo.FuseOpsError
    )


def test_a_side_input_of_a_wrong_shape_names_the_op() -> None:
    x, routing = routed()
    for wrong in (routing.probs[1:], routing.probs[:1], routing.probs[:, None]):
        for fused in (True, False):
            with (
                fo.fusion(fused),
                pytest.raises(fo.FuseOpsError, match=r"ScaledSwiGLU.*probs.*\(5,\)"),
            ):
                experts()(x, offs=routing.offs, probs=wrong)


# --- names live in their sequence -------------------------------------------------------------


@pytest.mark.parametrize("plain", [[], [nn.Tanh()]])
def test_reading_before_it_is_written_is_an_error(plain: list) -> None:
    with pytest.raises(fo.SideInputError, match=r"'a'.*read"):
        fo.Sequential(Add("a"), *plain, Tap("a"))(torch.ones(2), a=torch.ones(2))


@pytest.mark.parametrize("between", [[], [SiLU()], [nn.Tanh()], [Add("a")]])
def test_writing_twice_is_an_error(between: list) -> None:
    with pytest.raises(fo.SideInputError, match=r"'a'.*twice"):
        fo.Sequential(Tap("a"), *between, Tap("a"), Add("a"))(torch.ones(2))


def test_passing_what_is_written_is_an_error() -> None:
    with pytest.raises(fo.SideInputError, match=r"writes 'a'"):
        fo.Sequential(Tap("a"), Add("a"))(torch.ones(2), a=torch.ones(2))


@pytest.mark.parametrize(("op", "attribute"), [(Add("a"), "reads"), (Tap("a"), "writes")])
def test_a_side_name_that_is_no_string_is_refused(op: fo.Op, attribute: str) -> None:
    setattr(op, attribute, (3,))
    with pytest.raises(fo.SideInputError, match=r"op '0' .* no string"):
        fo.Sequential(op)(torch.ones(2))


@pytest.mark.parametrize("name", ["returns", "call"])
def test_reserved_names_are_refused(name: str) -> None:
    for ops in ([Add(name)], [Tap(name), Add(name)]):
        with pytest.raises(fo.FuseOpsError, match=f"'{name}'.*reserved"):
            fo.Sequential(*ops)(torch.ones(2))


@pytest.mark.parametrize("rest", [[], [SiLU()], [nn.Tanh(), SiLU()]])
def test_a_tap_that_nobody_reads_is_an_error(rest: list) -> None:
    seq = fo.Sequential(Tap("a"), *rest)
    x = torch.ones(2)
    with pytest.raises(fo.SideInputError, match="'a'"):
        seq(x)
    _, a = seq(x, returns=("a",))
    assert torch.equal(a, x)
    with pytest.raises(fo.SideInputError, match="'a'"):
        seq(x)


def test_a_tap_may_be_read_by_a_nested_sequence_or_beyond_a_plain_module() -> None:
    x = torch.randn(3)
    inner = fo.Sequential(SiLU(), Add("a"))
    torch.testing.assert_close(fo.Sequential(Tap("a"), inner)(x), inner(x, a=x))
    torch.testing.assert_close(fo.Sequential(Tap("a"), nn.Tanh(), Add("a"))(x), x.tanh() + x)


def test_a_published_tensor_that_is_no_tap_may_go_unread() -> None:
    assert fo.Sequential(Publish())(torch.ones(2)).tolist() == [2, 2]


def test_names_of_a_nested_sequence_are_its_own() -> None:
    x = torch.randn(3)
    inner = fo.Sequential(Tap("a"), SiLU(), Add("a"))
    outer = fo.Sequential(Tap("a"), inner, Add("a"))
    assert outer.reads == ()
    torch.testing.assert_close(outer(x), inner(x) + x)
    with pytest.raises(fo.SideInputError, match="a"):
        fo.Sequential(fo.Sequential(Publish("a")), Add("a"))(x)


def test_a_nested_sequence_that_starts_to_read_is_seen() -> None:
    x, w = torch.randn(3), torch.randn(3)
    inner = fo.Sequential(SiLU())
    outer = fo.Sequential(inner)
    outer(x)
    inner.append(Weigh())
    assert outer.reads == ("w",)
    torch.testing.assert_close(outer(x, w=w), SiLU()(x) * w)


# --- returns ----------------------------------------------------------------------------------


def test_returns_gives_side_outputs_in_the_order_asked_for() -> None:
    x = torch.randn(3, requires_grad=True)
    seq = fo.Sequential(Publish("a"), SiLU(), Publish("b"))
    y, b, a = seq(x, returns=("b", "a"))
    torch.testing.assert_close(a, x.square())
    torch.testing.assert_close(b, SiLU()(2 * x).square())
    assert torch.equal(y, seq(x))


def test_returned_side_outputs_carry_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    seq = fo.Sequential(Publish("a"), SiLU())
    y, a = seq(x, returns=("a",))
    (dx,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
    torch.testing.assert_close(dx, 2 * x.detach())
    (both,) = torch.autograd.grad(a.sum() + y.sum(), x)
    (alone,) = torch.autograd.grad(seq(x).sum(), x)
    torch.testing.assert_close(both, alone + dx)


def test_returns_of_one_name_or_none_is_as_of_several() -> None:
    seq, x = fo.Sequential(Publish("aux")), torch.ones(2)
    assert torch.equal(seq(x, returns=None), seq(x))
    assert str(seq.plan(x, returns=None)) == str(seq.plan(x))
    one, several = (str(seq.explain(x, returns=given)) for given in ("aux", ("aux",)))
    assert one == several


def test_returns_of_something_unwritten_says_what_is_written() -> None:
    with pytest.raises(fo.SideInputError, match=r"\['a'\].*'b'"):
        fo.Sequential(Publish("a"))(torch.ones(2), returns=("b",))


def test_one_name_as_a_string_is_one_name() -> None:
    _, aux = fo.Sequential(Publish("aux"))(torch.ones(2), returns="aux")
    assert aux.tolist() == [1, 1]


def test_integer_side_outputs_have_no_gradient() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    y, counts = fo.Sequential(Counts())(x, returns=("counts",))
    assert not counts.requires_grad and counts.tolist() == (x > 0).sum(0).tolist()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_an_op_that_does_not_publish_what_it_writes_is_named() -> None:
    class Silent(fo.Op):
        writes = ("a",)

        def fwd(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(fo.FuseOpsError, match=r"Silent.*'a'"):
        fo.Sequential(Silent())(torch.ones(2), returns=("a",))


# --- gradients to side inputs -----------------------------------------------------------------


def test_gradients_reach_side_inputs_through_every_reader() -> None:
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    seq = fo.Sequential(Weigh(), SiLU(), fo.Sequential(Weigh()), nn.Tanh(), Add("w"))
    expected = torch.autograd.grad(((SiLU()(x * w) * w).tanh() + w).sum(), w)
    torch.testing.assert_close(torch.autograd.grad(seq(x, w=w).sum(), w), expected)


def test_probs_get_their_gradient_with_and_without_fusion() -> None:
    seq, (x, routing) = experts(), routed()
    wanted = [x, routing.probs, *seq.parameters()]
    fused = torch.autograd.grad(seq(x, routing).square().sum(), wanted)
    with fo.reference():
        plain = torch.autograd.grad(seq(x, routing).square().sum(), wanted)
    torch.testing.assert_close(fused, plain)


def test_a_side_input_alone_can_want_the_gradient() -> None:
    seq, (x, routing) = experts().requires_grad_(False), routed()
    (dprobs,) = torch.autograd.grad(seq(x.detach(), routing).sum(), [routing.probs])
    with fo.reference():
        (expected,) = torch.autograd.grad(seq(x.detach(), routing).sum(), [routing.probs])
    torch.testing.assert_close(dprobs, expected)


# --- Routing ----------------------------------------------------------------------------------


def naive_offs(counts: list[int]) -> list[int]:
    return [sum(counts[: i + 1]) for i in range(len(counts))]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.booleans())
def test_from_counts_is_a_running_sum(counts: list[int], as_tensor: bool) -> None:
    offs = fo.Routing.from_counts(torch.tensor(counts) if as_tensor else counts).offs
    assert offs.tolist() == naive_offs(counts) and offs.dtype is torch.int32


@pytest.mark.parametrize(
    "counts",
    [[1.5, 2.0], [[1], [2]], [3, -1], [True, False], 4, None, "12", [None], [2**31 - 1, 1], {0: 1}],
)
def test_from_counts_refuses_what_is_no_counts(counts: object) -> None:
    with pytest.raises(fo.FuseOpsError, match="from_counts"):
        fo.Routing.from_counts(counts)


INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_from_counts_takes_every_integer_dtype(dtype: str) -> None:
    counts = torch.tensor([100, 0, 100, 100]).to(getattr(torch, dtype))
    assert fo.Routing.from_counts(counts).offs.tolist() == [100, 100, 200, 300]


def test_from_counts_without_experts_has_no_ends() -> None:
    assert fo.Routing.from_counts([]).offs.tolist() == []


def test_from_counts_refuses_fewer_probs_than_rows() -> None:
    fo.Routing.from_counts([2, 3], probs=torch.rand(6))  # the last row is padding
    with pytest.raises(fo.FuseOpsError, match=r"5 rows.*\(4,\)"):
        fo.Routing.from_counts([2, 3], probs=torch.rand(4))


@st.composite
def top_k(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Choices of tokens; -1 is a copy that was dropped."""
    E = draw(st.integers(1, 6))
    T, K = draw(st.integers(0, 8)), draw(st.integers(1, 3))
    flat = draw(st.lists(st.integers(-1, E - 1), min_size=T * K, max_size=T * K))
    return torch.tensor(flat, dtype=torch.int64).view(T, K), torch.rand(T, K), E


def by_expert(chosen: Tensor, weights: Tensor, E: int) -> Iterator[tuple[int, int, float]]:
    """(expert, token, weight) of every row, in order: the naive loop."""
    for e in range(E):
        for t, row in enumerate(chosen.tolist()):
            for k, expert in enumerate(row):
                if expert == e:
                    yield e, t, float(weights[t, k])


def assert_inverse(routing: fo.Routing, kept: Tensor) -> None:
    """`pos` has every row once, at the token that `index` says; -1 where nothing was kept."""
    assert routing.pos.dtype is torch.int32 and torch.equal(routing.pos >= 0, kept)
    assert sorted(routing.pos[kept].tolist()) == list(range(int(kept.sum())))
    for t, rows in enumerate(routing.pos.tolist()):
        assert all(routing.index[row] == t for row in rows if row >= 0)


@given(top_k())
def test_from_topk_is_the_naive_loop(case: tuple[Tensor, Tensor, int]) -> None:
    chosen, weights, E = case
    rows = list(by_expert(chosen, weights, E))
    routing = fo.Routing.from_topk(chosen, weights, num_experts=E)
    dropped = [0] * (chosen.numel() - len(rows))
    assert routing.index.tolist() == [t for _, t, _ in rows] + dropped
    assert routing.probs.tolist() == [w for _, _, w in rows] + dropped
    assert_inverse(routing, chosen >= 0)
    assert routing.offs.tolist() == naive_offs([sum(e == i for e, _, _ in rows) for i in range(E)])
    assert routing.offs.dtype is torch.int32 and routing.probs.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@given(case=top_k(), spare=st.integers(0, 200))
def test_experts_may_be_of_any_dtype_that_holds_them(
    dtype: torch.dtype, case: tuple[Tensor, Tensor, int], spare: int
) -> None:
    chosen, weights, E = case
    E = min(E + spare, torch.iinfo(dtype).max + 1)
    chosen = chosen if dtype.is_signed else chosen.clamp(min=0)
    wide, narrow = (
        fo.Routing.from_topk(experts, weights, num_experts=E)
        for experts in (chosen, chosen.to(dtype))
    )
    for field in ("offs", "probs", "index", "pos"):
        assert torch.equal(getattr(narrow, field), getattr(wide, field))


@given(st.integers(0, 7), st.integers(1, 5), st.integers(0, 2**20), st.integers(0, 4))
def test_from_multihot_is_the_naive_loop(T: int, E: int, seed: int, spare: int) -> None:
    g = torch.Generator().manual_seed(seed)
    chosen, probs = torch.rand(T, E, generator=g) < 0.4, torch.rand(T, E, generator=g)
    rows = [(e, t) for e in range(E) for t in range(T) if chosen[t, e]]
    routing = fo.Routing.from_multihot(chosen, probs)
    assert routing.index.tolist() == [t for _, t in rows]
    assert routing.probs.tolist() == [float(probs[t, e]) for e, t in rows]
    assert routing.offs.tolist() == naive_offs([int(c) for c in chosen.sum(0)])
    assert_inverse(routing, chosen)
    if T:
        roomy = fo.Routing.from_multihot(chosen, probs, rows=len(rows) + spare)
        assert (
            len(roomy.index) == len(rows) + spare and roomy.offs.tolist() == routing.offs.tolist()
        )


def test_from_multihot_refuses_too_little_room() -> None:
    with pytest.raises(fo.FuseOpsError, match="6 rows are chosen, rows=4"):
        fo.Routing.from_multihot(torch.ones(3, 2, dtype=torch.bool), torch.rand(3, 2), rows=4)


def test_routing_probabilities_keep_their_graph() -> None:
    weights = torch.rand(3, 2, requires_grad=True)
    chosen = torch.tensor([[0, 1], [1, -1], [1, 1]])
    routing = fo.Routing.from_topk(chosen, weights, num_experts=2)
    routing.probs.square().sum().backward()
    torch.testing.assert_close(weights.grad, 2 * weights.detach() * (chosen >= 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probabilities_are_in_float32_and_never_rounded(dtype: torch.dtype) -> None:
    """A float64 model stays one: rounded probabilities made its router's gradients wrong by 1e-8."""
    weights = torch.rand(1, 2, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    topk = fo.Routing.from_topk(torch.tensor([[0, 1]]), weights, num_experts=2)
    multihot = fo.Routing.from_multihot(torch.ones(1, 2, dtype=torch.bool), weights)
    for routing in (topk, multihot):
        assert routing.probs.dtype is wide and torch.equal(routing.probs, weights[0].to(wide))


def test_from_topk_counts_the_experts_where_nobody_says_how_many() -> None:
    routing = fo.Routing.from_topk(torch.tensor([[0, 2]]), torch.ones(1, 2))
    assert routing.offs.tolist() == [1, 1, 2]


def test_from_topk_cannot_count_experts_that_nobody_chose() -> None:
    with pytest.raises(fo.FuseOpsError, match="num_experts"):
        fo.Routing.from_topk(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))


@pytest.mark.parametrize(
    "builder, given",
    [
        ("from_topk", ([[0, 1]], torch.ones(1, 2))),
        ("from_topk", (torch.zeros(1, 2), torch.ones(1, 2))),
        ("from_topk", (torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2))),
        ("from_topk", (torch.tensor([[0, 1]]), torch.tensor([[1, 1]]))),
        ("from_multihot", ([[True]], torch.ones(1, 1))),
        ("from_multihot", (torch.ones(1, 1), torch.ones(1, 1))),
        ("from_multihot", (torch.ones(1, 1, dtype=torch.bool), torch.tensor([[1]]))),
        ("from_multihot", (torch.ones(1, 2, dtype=torch.bool), torch.ones(2, 1))),
        ("from_multihot", (torch.ones(2, dtype=torch.bool), torch.ones(2))),
    ],
)
def test_a_routing_of_the_wrong_kind_says_what_is_wanted(builder: str, given: Any) -> None:
    with pytest.raises(fo.FuseOpsError, match=f"{builder} expects"):
        getattr(fo.Routing, builder)(*given)


@pytest.mark.parametrize("expert", [-2, 2])
def test_from_topk_refuses_an_expert_that_is_not_there(expert: int) -> None:
    with pytest.raises(fo.FuseOpsError, match=f"expert.*{expert}"):
        fo.Routing.from_topk(torch.tensor([[0, expert]]), torch.ones(1, 2), num_experts=2)


def test_a_routing_is_a_pytree() -> None:
    _, routing = routed()
    leaves, spec = torch.utils._pytree.tree_flatten(routing)
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is fo.Routing


def test_a_routed_mixture_is_the_loop_over_tokens() -> None:
    T, E, K, D = 6, 3, 2, 4
    seq = experts(E, D)
    x, weights = torch.randn(T, D), torch.rand(T, K)
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    routing = fo.Routing.from_topk(chosen, weights, num_experts=E)
    y = torch.zeros(T, D).index_add(0, routing.index, seq(x[routing.index], routing))
    for t in range(T):
        expected = torch.zeros(D)
        for k in range(K):
            e = int(chosen[t, k])
            gate, up = (seq.fc1.weight[e] @ x[t]).chunk(2)
            hidden = nn.functional.silu(gate) * up * weights[t, k]
            expected = expected + seq.fc2.weight[e] @ hidden
        torch.testing.assert_close(y[t], expected)


class WeighModule(nn.Module):
    """The same as `Weigh`, of a plain module."""

    reads = ("w",)

    def forward(self, x: Tensor, *, w: Tensor) -> Tensor:
        return x * w


class Wrapper(nn.Module):
    """Hands on what it is given, as the layers of PEFT do."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor, **side: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x, **side)
        return y


@pytest.mark.parametrize("make", [WeighModule, lambda: Wrapper(Wrapper(Weigh()))])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_plain_module_takes_the_side_inputs_that_it_reads(make: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    model = fo.Sequential(Linear(4, 4), make(), Publish("v"), SiLU())
    assert model.reads == ("w",)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    expected = torch.nn.functional.silu(2 * model[0](x) * w)
    grads = torch.autograd.grad(expected.sum(), (x, w))
    y = run(x, w=w)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), grads)


def test_what_a_plain_module_reads_may_be_published_before_it_and_change() -> None:
    model = fo.Sequential(Tap("w"), SiLU(), WeighModule())
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), torch.nn.functional.silu(x) * x)
    with pytest.raises(fo.SideInputError, match="needs side inputs"):
        model[1:](x)
    model[2].reads = ()  # read anew
    with pytest.raises(fo.SideInputError, match="nobody reads the Tap"):
        model(x)


def test_a_string_is_no_tuple_of_names() -> None:
    class Reads(fo.Op):
        reads = "w"  # type: ignore[assignment]

        def fwd(self, x: Tensor, *, w: Tensor) -> Tensor:
            return x * w

    with pytest.raises(fo.FuseOpsError, match=r"Reads.reads is the string 'w'.*\('w',\)"):
        fo.Sequential(Reads())(torch.randn(2, 3), w=torch.ones(3))


@pytest.mark.parametrize("nested", [False, True])
def test_a_swap_goes_on_with_a_branch_of_another_width(nested: bool) -> None:
    first, second = nn.Linear(8, 24), nn.Linear(12, 24)
    ops = [
        fo.ops.Linear(8, 24),
        fo.ops.Swap("other", "first"),
        fo.ops.Linear(12, 24),
        fo.ops.Add("first"),
    ]
    ops[0].load_state_dict(first.state_dict()), ops[2].load_state_dict(second.state_dict())
    seq = fo.Sequential(*ops[:2], fo.Sequential(*ops[2:])) if nested else fo.Sequential(*ops)
    x, other = (torch.randn(3, n, requires_grad=True) for n in (8, 12))
    y = seq(x, other=other)
    torch.testing.assert_close(y, first(x) + second(other))
    found = torch.autograd.grad(y.sin().sum(), (x, other))
    expected = torch.autograd.grad((first(x) + second(other)).sin().sum(), (x, other))
    torch.testing.assert_close(found, expected)
    with pytest.raises(fo.errors.ShapeError):  # what it goes on with is checked again
        seq(x, other=torch.randn(3, 13))
    run = torch.compile(seq, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x, other=other), y)


# --- another name


def two_experts(**names: str) -> fo.Sequential:
    """Experts, twice: the second with other rows and probabilities."""
    torch.manual_seed(2)
    rows = {} if not names else {"offs": names["offs"]}
    return fo.Sequential(
        GroupedLinear(3, 4, 12, bias=False),
        ScaledSwiGLU(),
        GroupedLinear(3, 6, 4, bias=False),
        GroupedLinear(2, 4, 12, bias=False, **rows),
        ScaledSwiGLU(**{k: n for k, n in names.items() if k == "probs"}),
        GroupedLinear(2, 6, 4, scale_bias=True, **names),
    )


def test_side_inputs_under_other_names_are_other_tensors() -> None:
    model = two_experts(offs="o2", probs="p2")
    assert model.reads == ("offs", "probs", "o2", "p2") and "offs='o2'" in repr(model)
    x, routing = routed()
    o2 = torch.tensor([1, 5], dtype=torch.int32)
    p2 = torch.rand(5, requires_grad=True)
    y = model(x, routing, o2=o2, p2=p2)
    (fused,) = [str(span.rule) for span in model.plan(x, routing, o2=o2, p2=p2).forward[1:]]
    assert fused == "grouped_mlp"
    first, second = model[:3], model[3:]
    for op in second:  # type: ignore[attr-defined]
        op.renames = {}
    expected = fo.Sequential(*second)(first(x, routing), offs=o2, probs=p2)
    assert torch.equal(y, expected)
    inputs = [x, routing.probs, p2, *model.parameters()]
    got = torch.autograd.grad(y.sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(expected.sum(), inputs), strict=True):
        assert torch.equal(a, b)


def test_a_name_of_what_is_not_read_is_refused() -> None:
    op = ScaledSwiGLU()
    op.rename(offs="o2")
    with pytest.raises(fo.FuseOpsError, match=r"ScaledSwiGLU renames \['offs'\], and reads"):
        op(torch.randn(2, 4), probs=torch.rand(2))
    with pytest.raises(TypeError, match="probs"):
        fo.ops.SwiGLU(probs="p2")
