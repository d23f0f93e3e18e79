"""Hugging Face transformers: its models run by fuseops in place, and weights between its keys and fuseops'.

apply, revert, ApplyReport    patch an existing model: `hf.apply(model)` (applied, report)
to_fuseops, to_hf             convert state dicts of models that have fuseops layers (weights)

Importing this package registers `experts_implementation="fuseops"` with transformers, where that is installed.

stand_ins    attaches ops to modules whose parameters they read     recognise    identifies what a module computes
adapters     runs LoRA adapters of PEFT                             packing      packs gate and up into one parameter
experts, mlp, norm, router, rope, loss: the stand-in for one kind of module each
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
