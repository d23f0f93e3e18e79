"""A recipe gives each operand of a GEMM its format. A recipe is a value; equal recipes give equal plans."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch

from fuseops.errors import FuseOpsError

from .scaling import COLUMN, E4M3, E5M2, SQUARE, VECTOR, Scaling
from .store import POLICIES

BACKWARDS = (None, "high_precision", "dequantized")
FORMAT = {"kind": Scaling | None}  # of a field that is one


def option(*choices: Any) -> Any:
    """A field of a recipe that is one of these, by default the first."""
    return field(default=choices[0], metadata={"choices": choices})


def number(default: float, least: float) -> Any:
    """A field of a recipe that is a finite number, a whole one where the default is."""
    return field(default=default, metadata={"least": least})


def check_fields(made: Any) -> None:
    """Raise FuseOpsError for a field that is none of its choices, no format, or no number from its least one on."""
    for f in fields(made):
        value, wanted = getattr(made, f.name, None), ""
        if value not in (choices := f.metadata.get("choices", (value,))):
            wanted = f"one of {choices}"
        if not isinstance(value, f.metadata.get("kind", object)):
            wanted = "a fuseops.recipes.Scaling, or None for high precision"
        if (least := f.metadata.get("least")) is not None:
            kind = int if isinstance(f.default, int) else int | float
            if not isinstance(value, kind) or not least <= value < math.inf:
                wanted = f"a number, {least:g} or above"
        if wanted:
            raise FuseOpsError(f"{type(made).__name__}({f.name}={value!r:.80}): expected {wanted}.")


@dataclass(frozen=True)
class Roles:
    """`Roles` are the formats of one op's operands under a recipe; None is high precision.

    input, weight, grad_output   of the GEMMs' operands
    high_wgrad  the weight gradient multiplies x and dy as they are
    hidden      of what a fused MLP saves between its GEMMs
    weights     how long quantized weights are kept: "none", "step", "unshard"
    backward    what the gradients' GEMMs multiply: None, operands in these formats; "high_precision", all of them as
                they are; "dequantized", dy as it is, and of x and the weight what their codes in the forward stand for
    delayed     the recipe whose state gives the scales, where they are not those of the tensor itself
    columns, squares  follow from them: whether the weight gradient multiplies two quantized operands (of one alone it
                reads the rows), and whether those are squares, as producers of operands write them
    Raises FuseOpsError for another value of any of them.
    """

    input: Scaling | None = field(default=None, metadata=FORMAT)
    weight: Scaling | None = field(default=None, metadata=FORMAT)
    grad_output: Scaling | None = field(default=None, metadata=FORMAT)
    high_wgrad: bool = False
    hidden: Scaling | None = field(default=None, metadata=FORMAT)
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)
    delayed: Any = None
    columns: bool = field(init=False, repr=False, compare=False)
    squares: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        # dy stays as it is, and with "high_precision" all that it meets
        if self.backward is not None:
            object.__setattr__(self, "grad_output", None)
            object.__setattr__(self, "high_wgrad", self.backward == "high_precision")
        x, dy = self.input, self.grad_output
        columns = x is not None and dy is not None and not self.high_wgrad and self.backward is None
        squares = columns and all(t.columns == SQUARE and t.plain for t in (x, dy))  # type: ignore[union-attr]
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "squares", squares)
        for role in ("input", "weight", "hidden"):
            scaling = getattr(self, role)
            if scaling is not None and scaling.rounds_at_random:
                raise FuseOpsError(
                    f"{role} is {scaling}: the forward rounds to the nearest, so that a recomputation gives the same "
                    "numbers. Round gradients alone at random (grad_output)."
                )
        for role in ("input", "grad_output", "hidden"):
            scaling = getattr(self, role)
            if scaling is not None and any(scaling.of(side).square for side in ("row", "col")):
                raise FuseOpsError(
                    f"{role} is {scaling}: squares are of weights, and tokens of {role} share no scale. Give it blocks "
                    "of one row."
                )

    @property
    def high(self) -> bool:
        """Whether no operand is quantized."""
        return self.input is None and self.weight is None and self.grad_output is None

    @property
    def random(self) -> bool:
        """Whether gradients are rounded at random."""
        return self.grad_output is not None and self.grad_output.rounds_at_random

    @property
    def kernels(self) -> bool:
        """Whether every operand is quantized, by kernels into codes that there are kernels to multiply."""
        scalings = self.input, self.weight, self.grad_output
        if not all(s is not None and s.kernel is not None and s.plain for s in scalings):
            return False
        return self.weight.block != VECTOR  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe turns the role of an operand (input, weight or output gradient) into its format; this is their base.

    A subclass that is a frozen dataclass is compared by its fields, any other one by identity. What its fields may be
    is said where they stand, by `option` and `number`, and tried by the laws.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def roles(self) -> Roles:
        """The formats of an op's operands."""
        raise NotImplementedError(f"{type(self).__name__} defines no roles()")

    def roles_of(self, op: Any, name: str) -> Roles:
        """The formats of this op's operands; name: its dotted name, in the model where that is known."""
        return self.roles()

    def checked_roles_of(self, op: Any, name: str) -> Roles:
        """What `roles_of` gives.  Raises FuseOpsError where that is something else."""
        given = self.roles_of(op, name)
        if isinstance(given, Roles):
            return given
        raise FuseOpsError(
            f"{type(self).__name__} gave {given!r:.80} as the roles of {name!r} ({type(op).__name__}): expected a "
            "fuseops.recipes.Roles; Roles() is high precision."
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """`Float8CurrentScaling` is FP8 with one float32 scale a tensor (a group, when grouped), of the tensor's own amax.

    inv = max(format) / amax, data = cast(x * inv) clamped to the format's range, scale = 1 / inv. In amax NaN does not
    count and an infinity counts as the largest float32 (TransformerEngine: scale 1); amax 0 gives scale 1.
    fwd: format of inputs and weights; bwd: of gradients; weights: how long quantized ones are kept, backward: what the
    gradients' GEMMs multiply, and epsilon, as of `Float8BlockScaling`.
    powers_of_two: inv is rounded down to one.
    Raises FuseOpsError for another value of any of them.
    """

    fwd: torch.dtype = option(E4M3, E5M2)
    bwd: torch.dtype = option(E5M2, E4M3)
    _: KW_ONLY
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)
    powers_of_two: bool = option(False, True)
    epsilon: float = number(0.0, 0)

    def roles(self) -> Roles:
        options: dict[str, Any] = {"powers": self.powers_of_two, "epsilon": self.epsilon}
        forward, grad = (Scaling(data, None, None, **options) for data in (self.fwd, self.bwd))
        return Roles(forward, forward, grad, weights=self.weights, backward=self.backward)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """`Float8BlockScaling` is FP8 with a power-of-two scale for every 128 elements along the axis that a GEMM sums, and
    for every square of 128 x 128 of a weight (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    inv = max(format) / amax rounded down to a power of two, at most 2^63, data = cast(x * inv), scale = 1 / inv.
    Data times scale is exact in bfloat16. Blocks of tokens begin anew in each group of a grouped op.

    wgrad: of what the weight gradient is made. "square": the codes of the rows, shifted to one exponent in each square
        of 128 tokens by 128 features, so that a value is rounded once for all three GEMMs; codes that the shift brings
        below the format's normal numbers lose bits. "block": 128 tokens of one feature share a scale, from high
        precision. "bf16": of x and dy as they are.
    hidden: what a fused MLP saves between its GEMMs, "bf16" (as computed) or "float8", which the activation of the
        forward reads too.
    weights: how long quantized weights are kept. "none": they are made where they are read, rows in the forward and
        their transpose in the backward. "step": both are made once, in one pass, and kept for every micro-batch until
        an optimizer steps or `fuseops.weights_changed` says so: 2 bytes a parameter. "unshard": the same, and FSDP2's
        freeing of a gathered weight frees them.
    backward: what the gradients' GEMMs multiply. None: dy, x and weights in this format. "high_precision": all of them
        as they are. "dequantized": dy as it is, with what the codes of the forward's x and weight stand for.
    powers_of_two: False: scales are any float32 number; not with wgrad="square", whose shifts are powers of two.
    epsilon: the smallest amax that counts; smaller ones are it.
    square_weights: False: 128 elements of a weight along the axis that is summed share a scale, in each direction anew.
    fwd: format of inputs and weights; bwd: of gradients.
    Kernels write the formats of the default scales; with powers_of_two=False, epsilon or square_weights=False plain
    torch does, and without square weights GEMMs multiply what codes stand for.
    Raises FuseOpsError for another value of any of them.
    """

    wgrad: str = option("square", "block", "bf16")
    hidden: str = option("bf16", "float8")
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)
    powers_of_two: bool = option(True, False)
    epsilon: float = number(0.0, 0)
    square_weights: bool = option(True, False)
    fwd: torch.dtype = option(E4M3, E5M2)
    bwd: torch.dtype = option(E4M3, E5M2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wgrad == "square" and not self.powers_of_two:
            raise FuseOpsError(
                'Float8BlockScaling(powers_of_two=False): expected wgrad="block" or "bf16", since '
                '"square" shifts codes by powers of two.'
            )

    def roles(self) -> Roles:
        options: dict[str, Any] = {"powers": self.powers_of_two, "epsilon": self.epsilon}
        columns = COLUMN if self.wgrad == "block" or not self.powers_of_two else SQUARE
        forward = Scaling(self.fwd, VECTOR, columns, **options)
        weight = (SQUARE, SQUARE) if self.square_weights else (VECTOR, COLUMN)
        return Roles(
            input=forward,
            weight=Scaling(self.fwd, *weight, **options),
            grad_output=Scaling(self.bwd, VECTOR, columns, **options),
            high_wgrad=self.wgrad == "bf16",
            hidden=forward if self.hidden == "float8" else None,
            weights=self.weights,
            backward=self.backward,
        )
