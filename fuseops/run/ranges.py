"""Ranges of a profile, named by span: `blocks.3.moe:routed_mlp`, `blocks.3.moe.router`, and ` backward` behind either.

They are there while torch's profiler runs (or `torch.autograd.profiler.emit_nvtx`), and with FUSEOPS_NVTX=1 as NVTX
ranges without it. A segment then runs as a copy of itself whose steps are gone through one range at a time, so that a
step without a profiler asks once for each run of ops, and nothing for an op.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from fuseops.plan.segment import Segment, Step

S = TypeVar("S", bound=Step)
NVTX = os.environ.get("FUSEOPS_NVTX", "0") == "1"


class RangedSteps(tuple[S, ...]):
    """Steps, each of which is in a range of the profile while a loop over them is at it."""

    labels: tuple[str, ...]

    def __new__(cls, steps: Iterable[S], labels: Iterable[str]) -> RangedSteps[S]:
        made = super().__new__(cls, steps)
        made.labels = tuple(labels)
        return made

    def __iter__(self) -> Iterator[S]:
        for step, label in zip(tuple.__iter__(self), self.labels, strict=True):
            with _range(label):
                yield step


def _range(label: str) -> AbstractContextManager[Any]:
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(label)
    return torch.cuda.nvtx.range(label)


def in_ranges(segments: Sequence[Segment], path: str) -> list[Segment]:
    """Copies of segments whose steps run inside profiler ranges."""
    return [seg if seg.kind == "call" else _ranged(seg, path) for seg in segments]


def _ranged(seg: Segment, path: str) -> Segment:
    found: Segment | None = seg.ranged.get(path)
    if found is None:
        found = seg.ranged[path] = replace(seg)
        labels = [label(seg, step, path) for step in seg.backward]
        found.backward = RangedSteps(seg.backward, [f"{name} backward" for name in labels])
        found.forward = RangedSteps(seg.forward, [label(seg, step, path) for step in seg.forward])
    return found


def label(seg: Segment, step: Step, path: str) -> str:
    """The name of a step: the module that its ops stand in and its rule, or the path of its one op."""
    names = [f"{path}{seg.names[i]}" for i in step.members]
    if not step.rule:
        return names[0]
    parents = [name.split(".")[:-1] for name in names]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    where = ".".join(parts[0] for parts in shared)
    return f"{where or f'{names[0]}..{names[-1]}'}:{step.rule}"
