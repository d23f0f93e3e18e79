"""The names of TransformerEngine's ops that are called otherwise here, for the error of who types one.

The column "te.ops" of docs/ops.md says the same of every op.
"""

from __future__ import annotations

OURS = {
    "AddExtraInput": "ops.Add",
    "BasicLinear": "ops.Linear",
    "L2Normalization": "ops.L2Norm",
    "MakeExtraOutput": "ops.Tap",
    "ScaledClampedQGeGLU": "ops.ScaledClampedSwiGLU",
    "Sequential": "Sequential",
}


def no_attribute(module: str, name: str, ops: tuple[str, ...] = ()) -> AttributeError:
    """The error for a name that a module does not have, with ours where it is one of te.ops.

    ops: names that are to be looked for in fo.ops
    """
    ours = f"ops.{name}" if name in ops else OURS.get(name)
    hint = "" if ours is None else f"; here it is fo.{ours} (docs/coming_from.md)"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
