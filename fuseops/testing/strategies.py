"""Hypothesis strategies: shapes, splits, values and layouts that break kernels; ops, matches of rules, and chains."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fuseops import recipes as builtin
from fuseops.layers.sequential import Residual, Sequential
from fuseops.ops.linear import Linear
from fuseops.ops.op import Op
from fuseops.ops.routing import Routing
from fuseops.ops.structure import Add, Tap
from fuseops.recipes import ByName, ByRole, Recipe, Scaling
from fuseops.recipes.micro import mxfp8, nvfp4
from fuseops.recipes.scaling import COLUMN
from fuseops.rules.rule import Rule

from .catalogue import Wanted, catalogue, entry
from .shadowed import expansions

GROUPS = 4
KINDS = ("normal", "normal", "large", "denormal", "constant", "zeros")  # finite values
NONFINITE = ("nan", "inf")
LAYOUTS = ("contiguous", "transposed", "sliced", "inside", "expanded")
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Case(NamedTuple):
    """A `Case` is an op or Sequential to call, and the inputs to call it with."""

    model: Any  # an op, or a Sequential
    x: Tensor
    side: dict[str, Tensor]

    def __repr__(self) -> str:  # for Hypothesis, which shows the failing case
        side = {name: f"{t.dtype}{list(t.shape)}" for name, t in self.side.items()}
        offs = self.side["offs"].tolist() if "offs" in self.side else None
        return f"Case({self.model}, x {self.x.dtype}{list(self.x.shape)} {self.x.stride()}, {side}, offs={offs})"


class Split(NamedTuple):
    """A `Split` is the number of rows in each group, and of padding rows after the last."""

    counts: tuple[int, ...]
    padding: int

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.padding

    @property
    def offs(self) -> Tensor:
        return torch.tensor(self.counts).cumsum(0).to(torch.int32)

    def padded_to_tokens(self, top_k: int) -> "Split":
        """This split with its rows padded to a multiple of top_k, the copies of whole tokens."""
        return self._replace(padding=self.padding + -self.rows % top_k)


# --- the numbers


def dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def row_counts() -> st.SearchStrategy[int]:
    """Numbers of rows: none, one, and neighbours of the powers of two that tiles have."""
    return st.sampled_from([5, 0, 1, 2, 63, 65, 127])


def widths() -> st.SearchStrategy[int]:
    """Numbers of features, most of which no tile divides."""
    return st.sampled_from([6, 1, 2, 3, 8, 16, 17, 33])


def group_counts() -> st.SearchStrategy[int]:
    """Numbers of groups, or of experts: a few, or one."""
    return st.sampled_from([GROUPS, GROUPS, 1, 2])


def top_ks(groups: int) -> st.SearchStrategy[int]:
    """Numbers of experts for a token: one, some, all."""
    return st.sampled_from(sorted({min(2, groups), 1, min(3, groups), groups}))


@st.composite
def group_splits(draw: Draw, groups: int = GROUPS) -> Split:
    """Splits into uneven groups, with empty ones, one that has all rows, or no rows; with and without padding."""
    kind = draw(st.sampled_from(["uneven", "one", "empty"]))
    padding = draw(st.sampled_from([0, 0, 1, 7]))
    if kind == "empty":
        return Split((0,) * groups, padding)
    if kind == "one":
        at, rows = draw(st.integers(0, groups - 1)), draw(row_counts())
        return Split(tuple(rows if e == at else 0 for e in range(groups)), padding)
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 5, 17]), min_size=groups, max_size=groups))
    return Split(tuple(counts), padding)


# --- the values


def filled(shape: Sequence[int], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """A tensor with values of one of `KINDS` or `NONFINITE`, drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    some = torch.rand(x.shape, generator=generator) < 0.1
    if kind == "large":
        x = torch.where(some, x * 1e3, x)
    elif kind == "denormal":
        x = torch.where(some, x * float(torch.finfo(dtype).tiny) / 8, x)
    elif kind == "constant" and x.dim() > 1 and x.numel():
        x = x[..., :1].expand(x.shape)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "nan":
        x = x.masked_fill(some, float("nan"))
    elif kind == "inf":
        x = torch.where(some, x.sign() * float("inf"), x)
    return x.contiguous().to(dtype)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides: "inside" a larger tensor, at an odd offset; "expanded" repeats the first row
    with a stride of 0.
    """
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and x.dim():
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "inside" and x.dim():
        larger = x.new_zeros([size + 2 for size in x.shape])
        larger[(slice(1, -1),) * x.dim()] = x
        return larger[(slice(1, -1),) * x.dim()]
    if layout == "expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@st.composite
def tensors(
    draw: Draw,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float64,
    kinds: Sequence[str] = KINDS,
    layouts: Sequence[str] = LAYOUTS,
) -> Tensor:
    """Tensors of extreme values, with layouts that a kernel must not take for contiguous."""
    kind, layout = draw(st.sampled_from(kinds)), draw(st.sampled_from(layouts))
    return with_layout(filled(shape, dtype, kind, draw(st.integers(0, 999))), layout)


# --- ops


def _instance(
    draw: Draw,
    op: type,
    width: int,
    after: int,
    groups: int,
    top_k: int = 2,
    out: int | None = None,
    middle: tuple[int, ...] = (),
) -> Op[Any]:
    """An instance of `op` for this input width, whose output width is a multiple of `after`, or `out` if possible."""
    out = out or draw(widths()) * after

    def choose(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    wanted = Wanted(choose, width, out, groups, top_k, middle)
    made = entry(op).make(wanted)
    with torch.no_grad():
        for p in made.parameters():  # ones and zeros, as many start out, hide mistakes
            p.add_(filled(p.shape, p.dtype, "normal", draw(st.integers(0, 99))), alpha=0.1)
    return made


def routing_op(made: Sequence[nn.Module]) -> Op[Any] | None:
    """The first op that takes part in the routing of tokens, or None."""
    ops = (op for op in made if isinstance(op, Op) and entry(type(op)).routing)
    return next(ops, None)


def side_tensors(
    made: Sequence[nn.Module],
    names: Sequence[str],
    x: Tensor,
    split: Split,
    seed: int,
    probs: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Side inputs of these ops by their usual names; any other name gets a tensor like x."""
    generator = torch.Generator().manual_seed(seed)
    dtype = probs or x.dtype
    known, router = {"offs": split.offs}, routing_op(made)
    if router is not None:
        known |= _routing_tensors(split, _top_k(router), dtype, generator)
    row = x.shape[:-1] if router is None else (split.rows,)
    known["probs"] = torch.rand(row, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 3, x.shape[:-1], generator=generator)
    known["targets"] = targets.where(torch.rand(x.shape[:-1], generator=generator) < 0.8, -100)
    known["targets"].view(-1)[:1] = 1  # not ignored, or there might be no loss to test
    if x.dim() > 2:
        angles = torch.rand((*x.shape[-3:-2], x.shape[-1] // 2), generator=generator)
        known |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    known["router_loss"] = torch.rand((), generator=generator, dtype=torch.float64).to(dtype)
    return {n: known[n] if n in known else filled(x.shape, x.dtype, "normal", seed) for n in names}


def _routing_tensors(
    split: Split, top_k: int, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """Routing tensors of tokens whose copies have this split; padding rows are dropped copies."""
    counts = torch.tensor([*split.counts, split.padding])
    sorted_experts = torch.tensor([*range(len(split.counts)), -1]).repeat_interleave(counts)
    order = torch.randperm(split.rows, generator=generator)
    experts = sorted_experts[order].view(split.rows // top_k, top_k).to(torch.int32)
    weights = torch.rand(experts.shape, generator=generator, dtype=torch.float64).to(dtype)
    rows = Routing.from_topk(experts, weights, num_experts=len(split.counts))
    return {"experts": experts, "weights": weights, "index": rows.index, "pos": rows.pos}  # type: ignore[dict-item]


def _top_k(op: Op[Any]) -> int:
    return getattr(op, "top_k", 2)


def _rows(made: Sequence[nn.Module], split: Split) -> tuple[Split, int]:
    """The split, padded to whole tokens where these ops route tokens, and the rows of the input."""
    router = routing_op(made)
    if router is None:
        return split, split.rows
    top_k = _top_k(router)
    split = split.padded_to_tokens(top_k)
    tokens = entry(type(router)).routing == "tokens"
    return split, split.rows // top_k if tokens else split.rows


@st.composite
def op_cases(
    draw: Draw,
    op: type[Op[Any]],
    dtype: torch.dtype = torch.float64,
    kinds: Sequence[str] = KINDS,
    layouts: Sequence[str] = LAYOUTS,
) -> Case:
    """An instance of a catalogued op with inputs that fit it."""
    found, groups = entry(op), draw(group_counts())
    split = draw(group_splits(groups))
    width = draw(widths()) * found.input_multiple(1)
    top_k = draw(top_ks(groups)) if found.routing else 2
    made = _instance(draw, op, width, 1, groups, top_k).to(dtype)
    split, rows = _rows([made], split)
    shapes: list[tuple[int, ...]] = [(rows, width)]
    if found.heads:
        shapes = [(rows, 2, width), (2, rows, 1, width)]
    elif not found.flat:
        shapes += [(2, split.rows, width), (draw(row_counts()), width)]
        shapes += [] if "probs" in made.reads else [(width,)]
    x = draw(tensors(draw(st.sampled_from(shapes)), dtype, kinds, layouts))
    seed = draw(st.integers(0, 99))
    return Case(made, x, side_tensors([made], made.reads, x, split, seed))


# --- chains


def _width_multiples(types: Sequence[type]) -> list[int]:
    """For every op, the number that its input width must be a multiple of."""
    needs = [1]
    for t in reversed(types):
        needs.append(entry(t).input_multiple(needs[-1]))
    return needs[::-1]


def _matching_ops(
    draw: Draw, types: Sequence[type], width: int, groups: int, middle: tuple[int, ...] = ()
) -> list[Op[Any]]:
    """Ops of these types, each fitting the one before it."""
    needs, made, start = _width_multiples(types), [], width
    top_k = draw(top_ks(groups)) if any(entry(t).routing for t in types) else 2
    for k, t in enumerate(types):
        out = start if Add in types[k + 1 :] else None  # an Add adds a tensor as wide as x
        op = _instance(draw, t, width, needs[k + 1], groups, top_k, out, middle)
        width = op.out_shape((1, *middle, width))[-1]
        made.append(op)
    return made


def with_readers(
    made: Sequence[Op[Any]], width: int, middle: tuple[int, ...] = ()
) -> list[Op[Any]]:
    """These ops, for inputs of this width, followed by an Add for every Tap, each under a unique name."""
    tapped: dict[str, int] = {}
    for k, op in enumerate(made):
        if isinstance(op, Tap):
            op.writes = (f"tap{k}",)
            tapped[f"tap{k}"] = width
        width = op.out_shape((1, *middle, width))[-1]
    ends: list[Op[Any]] = []
    for name, wanted in tapped.items():
        if width != wanted:
            ends.append(Linear(width, wanted, bias=False))
            values = filled((wanted, width), torch.float64, "normal", len(name))
            ends[-1].weight.data.copy_(values)  # type: ignore[operator]
        ends.append(Add(name))
        width = wanted
    return [*made, *ends]


@st.composite
def rule_cases(
    draw: Draw,
    rule: Rule,
    dtype: torch.dtype = torch.float64,
    kinds: Sequence[str] = KINDS,
    spelling: Sequence[type] | None = None,
) -> Case:
    """Sequentials that the pattern of a rule matches as a whole.

    spelling: one of `shadowed.expansions(rule)`; drawn if not given.
    """
    types = spelling or draw(st.sampled_from(list(expansions(rule))))
    groups = draw(group_counts())
    split = draw(group_splits(groups))
    width = draw(widths()) * _width_multiples(types)[0]
    flat = any(entry(t).flat or entry(t).routing for t in types)
    middle = draw(st.sampled_from([(), (2,)])) if not flat else ()
    made = _matching_ops(draw, types, width, groups, middle)
    model = Sequential(*with_readers(made, width, middle)).to(dtype)
    split, rows = _rows(list(model), split)
    x = draw(tensors((rows, *middle, width), dtype, kinds))
    probs = draw(st.sampled_from([dtype, torch.promote_types(dtype, torch.float32)]))
    side = side_tensors(list(model), model.reads, x, split, draw(st.integers(0, 99)), probs)
    return Case(model, x, side)


PLAIN: tuple[Callable[[int], nn.Module], ...] = (
    lambda width: nn.Linear(width, width),
    lambda width: nn.Tanh(),
    lambda width: nn.Dropout(0.3),
)
# Not drawn by themselves in a chain: a Tap that nothing reads is an error, as is a side name that is written twice, and
# plain modules do not take the result of Quantize.
NOT_DRAWN = ("Tap", "Add", "Reshape", "Swap", "InjectLoss", "Quantize")


def _next_modules(
    draw: Draw, rules: Sequence[Rule], width: int, depth: int, groups: int
) -> list[nn.Module]:
    """The next modules of a chain: an op, a match of a rule, a plain module, or a nested Sequential."""
    kind = draw(st.sampled_from(["op", "rule", "op", "rule", "plain", "inside"]))
    if kind == "plain":
        return [draw(st.sampled_from(PLAIN))(width)]
    if kind == "inside" and depth:
        inner = list(_chain(draw, rules, width, depth - 1, 2, groups))
        after = _width(inner, width)
        return [Residual(*inner) if after == width else Sequential(*inner)]
    if kind == "rule" and rules:
        types = draw(st.sampled_from(list(expansions(draw(st.sampled_from(rules))))))
        if any(entry(t).routing for t in types):
            return []  # the rows of a chain are either copies or tokens
    else:
        ops = [
            t
            for t, e in catalogue().items()
            if t.__name__ not in NOT_DRAWN and not e.routing and e.width != "ends" and not e.heads
        ]
        types = (draw(st.sampled_from(ops)),)
    if width % _width_multiples(types)[0]:
        return []
    made = _matching_ops(draw, types, width, groups)
    if not any(isinstance(op, Tap | Add) for op in made):
        return [*made]
    # in a Sequential, so that names are unique and the tensors that are added have this width
    return [
        Sequential(
            *(Tap(name) for op in made if isinstance(op, Add) for name in op.reads),
            *with_readers(made, width),
        )
    ]


def _width(modules: Sequence[nn.Module], width: int) -> int:
    for module in modules:
        if isinstance(module, Op):
            width = module.out_shape((1, width))[-1]
        elif isinstance(module, Sequential) and not isinstance(module, Residual):
            width = _width(list(module), width)
    return width


def _chain(
    draw: Draw, rules: Sequence[Rule], width: int, depth: int, size: int, groups: int
) -> Iterator[nn.Module]:
    for _ in range(draw(st.integers(1, size))):
        found = _next_modules(draw, rules, width, depth, groups)
        width = _width(found, width)
        yield from found


BUILTIN = [r for r in vars(builtin).values() if isinstance(r, type) and issubclass(r, Recipe)]
DRAWN = sorted((r for r in BUILTIN if r not in (Recipe, ByName)), key=lambda r: r.__name__)
OPTION_VALUES = {"epsilon": [0.0, 0.5], "margin": [0, 1], "amax_history_len": [2]}


@st.composite
def recipes(draw: Draw, hidden: Sequence[str] = ("bf16",)) -> Recipe:
    """Built-in recipes with any of their options, except stochastic rounding, which would make comparisons random.

    hidden: formats between two GEMMs; with "float8" a fused MLP computes other values than its ops.
    DelayedScaling starts without a state, and then uses the scales of the tensors themselves.
    """
    kind: Any = draw(st.sampled_from(DRAWN))
    choices = {f.name: f.metadata["choices"] for f in fields(kind) if "choices" in f.metadata}
    choices |= {name: values for name, values in OPTION_VALUES.items() if hasattr(kind, name)}
    choices |= {"hidden": hidden} if "hidden" in choices else {}
    choices |= {"stochastic": [False]} if "stochastic" in choices else {}
    options = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    if options.get("wgrad") == "square":  # whose codes are shifted by powers of two
        options["powers_of_two"] = True
    if kind is ByRole:
        options["choose"] = Formats(*(draw(scalings()) for _ in range(3)))
    made: Recipe = kind(**options)
    return made


@dataclass(frozen=True)
class Formats:
    """A `Formats` maps roles to formats, as a function for `ByRole`."""

    input: Scaling | None
    weight: Scaling | None
    grad_output: Scaling | None

    def __call__(self, op: Any, name: str, role: str) -> Scaling | None:
        found: Scaling | None = getattr(self, role)
        return found


@st.composite
def scalings(draw: Draw) -> Scaling | None:
    """Formats of an operand, quantized along the axis that is summed, some with another one for columns; or None."""
    data = draw(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
    made = [
        None,
        Scaling(data, columns=COLUMN),
        Scaling(data, columns=COLUMN, powers=False, epsilon=draw(st.sampled_from([0.0, 0.5]))),
        Scaling(data, None, None),
        mxfp8(data),
        nvfp4(hadamard=draw(st.booleans())),
    ]
    rows, columns = draw(st.sampled_from(made)), draw(st.sampled_from(made))
    if rows is None or columns is None or draw(st.booleans()):
        return rows
    return replace(rows, colwise=columns)


@st.composite
def chains(
    draw: Draw,
    rules: Sequence[Rule],
    dtype: torch.dtype = torch.float64,
    kinds: Sequence[str] = KINDS,
) -> Case:
    """Random chains that rules match in part: ops, matches of rules, plain modules, Residuals, nested Sequentials."""
    groups, width = draw(group_counts()), math.lcm(2, draw(widths()))
    split = draw(group_splits(groups))
    model = Sequential(*_chain(draw, rules, width, 1, 5, groups)).to(dtype)
    x = draw(tensors((split.rows, width), dtype, kinds))
    frozen = draw(st.sets(st.sampled_from(range(8)), max_size=4))
    for k, p in enumerate(model.parameters()):
        p.requires_grad_(k % 8 not in frozen)
    side = side_tensors(list(model), model.reads, x, split, draw(st.integers(0, 99)))
    return Case(model, x, side)
