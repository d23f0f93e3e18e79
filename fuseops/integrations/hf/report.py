"""What `hf.apply` did with each module, and why not more."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fuseops.explain.layout import glob
from fuseops.words import aligned


class ReportEntry(NamedTuple):
    """A `ReportEntry` is one module that fuseops might run.

    path    where it stands in the model
    part    "experts", "router", "mlp", "norm", "rope", "adapter" or "loss"
    module  the name of its class
    by      what runs it now, in words; None where its own forward does
    why     the reason, where nothing was replaced
    """

    path: str
    part: str
    module: str
    by: str | None = None
    why: str | None = None


class ApplyReport(NamedTuple):
    """An `ApplyReport` says which modules of a model were replaced and which were not; `str()` gives a table.

    model    the name of its class
    entries  every module that was looked at, in the order of the model
    dry_run  nothing was changed
    """

    model: str
    entries: tuple[ReportEntry, ...]
    dry_run: bool = False

    @property
    def replaced(self) -> tuple[ReportEntry, ...]:
        return tuple(e for e in self.entries if e.by is not None)

    @property
    def left(self) -> tuple[ReportEntry, ...]:
        return tuple(e for e in self.entries if e.by is None)

    def __str__(self) -> str:
        verb = "would run" if self.dry_run else "runs"
        done, of = len(self.replaced), len(self.entries)
        lines = [f"{self.model}: fuseops {verb} {done} of {of} modules that it looked at"]
        for title, entries in (("replaced", self.replaced), ("left as they are", self.left)):
            if entries:
                lines += [f"  {title}", *_lines(entries)]
        return "\n".join(lines)


def _lines(entries: tuple[ReportEntry, ...]) -> list[str]:
    """A line for all modules of one kind: how many, their class, where, by what or why not."""
    counted = Counter(
        (e.part, e.module, glob(e.path) or "(the model)", e.by or e.why or "") for e in entries
    )
    rows = [(str(n), part, cls, at, said) for (part, cls, at, said), n in counted.items()]
    return [f"    {line}" for line in aligned(rows, (0,))]
