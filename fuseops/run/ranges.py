"""Profiler ranges, named by span: `blocks.3.moe:routed_mlp`, `blocks.3.moe.router`, with ` backward` appended.

They exist while torch's profiler runs (or `torch.autograd.profiler.emit_nvtx`), and as NVTX ranges with FUSEOPS_NVTX=1.
A segment then runs as a copy whose generated code has a range around every step; without a profiler the only cost is
one check for each run of ops.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import torch

from fuseops import torch_private
from fuseops.plan.segment import Segment, Step

NVTX = os.environ.get("FUSEOPS_NVTX", "0") == "1"


def ranged(label: str) -> AbstractContextManager[Any]:
    """A range of the running profiler, or of NVTX."""
    if torch_private.is_profiling():
        return torch.profiler.record_function(label)
    return torch.cuda.nvtx.range(label)


def in_ranges(segments: Sequence[Segment], path: str) -> list[Segment]:
    """Copies of segments whose steps run inside profiler ranges."""
    return [seg if seg.kind == "call" else seg.variant(path, path=path) for seg in segments]


def label(seg: Segment, step: Step, path: str) -> str:
    """The name of a step's range: the common parent module of its ops and the rule, or the path of a single op."""
    names = [f"{path}{seg.names[i]}" for i in step.members]
    if not step.rule:
        return names[0]
    parents = [name.split(".")[:-1] for name in names]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    where = ".".join(parts[0] for parts in shared)
    return f"{where or f'{names[0]}..{names[-1]}'}:{step.rule}"
