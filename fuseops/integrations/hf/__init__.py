"""Hugging Face transformers: its models run by fuseops in place, and weights between its keys and fuseops'.

apply, revert, ApplyReport    a model that you have, with one line: `hf.apply(model)`
to_fuseops, to_hf         state dicts, where fuseops' own layers stand in the model (weights)

Importing this registers `experts_implementation="fuseops"` with transformers, where that is installed.

lent                      ops whose parameters a module lends     recognise    what a module computes
experts, mlp, norm,       what stands in for the forwards         applied      which of them, in a model
router, rope, loss                                                report       what came of it
"""

import importlib.util

from . import experts as _experts
from .applied import apply, revert
from .report import ApplyReport, ReportEntry
from .weights import to_fuseops, to_hf

if importlib.util.find_spec("transformers") is not None:
    _experts.register()

__all__ = [
    "ApplyReport",
    "ReportEntry",
    "apply",
    "revert",
    "to_fuseops",
    "to_hf",
]


def __dir__() -> list[str]:
    return __all__
