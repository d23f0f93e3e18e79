"""A recipe chooses the format of each operand of a GEMM. A recipe is a value; equal recipes give equal plans."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch

from fuseops.arguments import instance_of, is_number, is_one_of, shown
from fuseops.errors import FuseOpsError

from .scaling import COLUMN, E4M3, E5M2, SQUARE, VECTOR, Scaling

POLICIES = ("none", "step", "unshard")
"""How long quantized weights are kept: not at all, until the weights change, or at most until FSDP2 frees them."""
BACKWARDS = (None, "high_precision", "dequantized")
FORMAT = {"kind": Scaling | None}  # metadata of a field that is a format


def option(*choices: Any) -> Any:
    """A recipe field that takes one of these values; the first is the default."""
    return field(default=choices[0], metadata={"choices": choices})


def number(default: float, least: float) -> Any:
    """A recipe field that takes a finite number from `least` on, an integer where the default is one."""
    return field(default=default, metadata={"least": least})


def check_fields(recipe: Any) -> None:
    """Raise FuseOpsError for a field whose value is none of its choices, not a format, or not a number in its range."""
    for f in fields(recipe):
        value, expected = getattr(recipe, f.name, None), ""
        choices = f.metadata.get("choices")
        if choices is not None and not is_one_of(value, choices):
            expected = f"one of {choices}"
        if not isinstance(value, f.metadata.get("kind", object)):
            expected = "a fuseops.recipes.Scaling, or None for high precision"
        if (least := f.metadata.get("least")) is not None:
            fits = is_number(value) and not isinstance(value, bool) and value >= least
            if not fits or (isinstance(f.default, int) and not isinstance(value, int)):
                expected = f"a number, {least:g} or above"
        if expected:
            given = f"{type(recipe).__name__}({f.name}={shown(value)})"
            raise FuseOpsError(f"{given}: expected {expected}.")


@dataclass(frozen=True)
class Roles:
    """`Roles` are the formats of one op's operands under a recipe; None is high precision.

    input, weight, grad_output   formats of the operands of its GEMMs
    high_wgrad  the weight gradient multiplies x and dy in high precision
    hidden      format of the pre-activation that a fused MLP saves
    weights     how long quantized weights are kept: "none", "step", "unshard"
    backward    operands of the gradients' GEMMs: None, in these formats; "high_precision", all in high precision;
                "dequantized", dy in high precision, x and the weight dequantized from the forward's codes
    delayed     the recipe whose state gives the scales, where they are not computed from the tensor itself
    columns, square_columns   derived: whether the weight gradient multiplies two quantized operands (if only one is, it
                reads rows), and whether their columns are in squares, which the kernels before a GEMM can write
    Raises FuseOpsError for another value of any of them.
    """

    input: Scaling | None = field(default=None, metadata=FORMAT)
    weight: Scaling | None = field(default=None, metadata=FORMAT)
    grad_output: Scaling | None = field(default=None, metadata=FORMAT)
    high_wgrad: bool = option(False, True)
    hidden: Scaling | None = field(default=None, metadata=FORMAT)
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)
    delayed: Any = None
    columns: bool = field(init=False, repr=False, compare=False)
    square_columns: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        expected = "the recipe whose state gives the scales, or None"
        instance_of(self.delayed, Recipe | None, "Roles(delayed=...)", expected)
        # dy is in high precision, and with "high_precision" the other operand too
        if self.backward is not None:
            object.__setattr__(self, "grad_output", None)
            object.__setattr__(self, "high_wgrad", self.backward == "high_precision")
        x, dy = self.input, self.grad_output
        columns = x is not None and dy is not None and not self.high_wgrad and self.backward is None
        squares = all(t is not None and t.columns == SQUARE and t.has_defaults for t in (x, dy))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "square_columns", columns and squares)
        for role in ("input", "weight", "hidden"):
            scaling = getattr(self, role)
            if scaling is not None and scaling.rounds_at_random:
                raise FuseOpsError(
                    f"{role} is {scaling}: the forward rounds to the nearest, so that a recomputation gives the same "
                    "numbers. Round gradients alone at random (grad_output)."
                )
        for role in ("input", "grad_output", "hidden"):
            scaling = getattr(self, role)
            if scaling is not None and any(scaling.of(name).is_square for name in ("row", "col")):
                raise FuseOpsError(
                    f"{role} is {scaling}: squares are of weights, and tokens of {role} share no scale. Give it blocks "
                    "of one row."
                )

    @property
    def is_high_precision(self) -> bool:
        """Whether no operand is quantized."""
        return self.input is None and self.weight is None and self.grad_output is None

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are rounded at random."""
        return self.grad_output is not None and self.grad_output.rounds_at_random

    @property
    def kernels(self) -> bool:
        """Whether kernels both quantize and multiply every operand."""
        scalings = self.input, self.weight, self.grad_output
        if not all(s is not None and s.gemm_kind is not None and s.has_defaults for s in scalings):
            return False
        return self.weight.block != VECTOR  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class Recipe:
    """The base of recipes: a recipe maps the role of an operand (input, weight or output gradient) to its format.

    A subclass that is a frozen dataclass is compared by its fields, any other one by identity. `option` and `number`
    declare the values that a field takes; the tests draw from them.
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
        """The result of `roles_of`.  Raises FuseOpsError if that is no `Roles`."""
        given = self.roles_of(op, name)
        if isinstance(given, Roles):
            return given
        raise FuseOpsError(
            f"{type(self).__name__} gave {shown(given)} as the roles of {name!r} ({type(op).__name__}): expected a "
            "fuseops.recipes.Roles; Roles() is high precision."
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """`Float8CurrentScaling` is FP8 with one float32 scale a tensor (a group, when grouped), of the tensor's own amax.

    inv = max(format) / amax, data = cast(x * inv) clamped to the format's range, scale = 1 / inv. The amax ignores NaN
    and takes an infinity as the largest float32 (TransformerEngine: scale 1); amax 0 gives scale 1.
    fwd: format of inputs and weights; bwd: of gradients; weights, backward, epsilon: as in `Float8BlockScaling`.
    powers_of_two: inv is rounded down to a power of two.
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
    Data times scale is exact in bfloat16. In a grouped op no block of tokens spans two groups.

    wgrad: operands of the weight gradient. "square": the codes of the rows, shifted to one exponent in each square of
        128 tokens by 128 features, so that a value is rounded once for all three GEMMs; codes that the shift brings
        below the format's normal numbers lose bits. "block": quantized again from high precision, with one scale for
        128 tokens of a feature. "bf16": x and dy in high precision.
    hidden: format of the pre-activation that a fused MLP saves: "bf16" (as computed) or "float8", which the activation
        of the forward reads too.
    weights: how long quantized weights are kept. "none": they are quantized at each use, rows in the forward and their
        transpose in the backward. "step": both are made in one pass and kept for all micro-batches until an optimizer
        steps or `fuseops.weights_changed` is called: 2 bytes a parameter. "unshard": the same, but they are freed when
        FSDP2 frees the gathered weight.
    backward: operands of the gradients' GEMMs. None: dy, x and weights in this format. "high_precision": all in high
        precision. "dequantized": dy in high precision, x and the weight dequantized from the forward's codes.
    powers_of_two: False: scales are any float32 number; not with wgrad="square", whose shifts are powers of two.
    epsilon: the lower bound of the amax.
    square_weights: False: a scale for 128 elements of a weight along the summed axis, so forward and input gradient
        read different codes.
    fwd: format of inputs and weights; bwd: of gradients.
    Kernels quantize to the default scales. With powers_of_two=False, epsilon or square_weights=False plain torch
    quantizes, and without square weights GEMMs multiply dequantized operands.
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
