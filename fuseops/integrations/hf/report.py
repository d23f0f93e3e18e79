"""The report of `hf.apply`: which modules were replaced, by what, and why others were not."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fuseops.explain.layout import glob
from fuseops.words import aligned


class ReportEntry(NamedTuple):
    """A `ReportEntry` is one module that `apply` has examined.

    path    its path in the model
    part    "experts", "router", "mlp", "norm", "rope", "adapter" or "loss"
    module  the name of its class
    by      a description of its stand-in; None if its own forward runs
    why     the reason, if its own forward runs
    """

    path: str
    part: str
    module: str
    by: str | None = None
    why: str | None = None


class ApplyReport(NamedTuple):
    """An `ApplyReport` says which modules of a model were replaced and which were not; `str()` gives a table.

    model    the name of its class
    entries  every module that was examined, in the order of the model
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
        if not of:
            return (
                f"{self.model}: nothing here for fuseops to run. It looks for modules with the attributes of those of "
                "transformers: experts, routers, MLPs, norms, RoPE, a head with its loss."
            )
        lines = [f"{self.model}: fuseops {verb} {done} of {of} modules that it looked at"]
        for title, entries in (("replaced", self.replaced), ("left as they are", self.left)):
            if entries:
                lines += [f"  {title}", *_lines(entries)]
        return "\n".join(lines)


def _lines(entries: tuple[ReportEntry, ...]) -> list[str]:
    """Table rows, one for all modules with the same outcome: count, part, class, paths, description or reason."""
    counted = Counter(
        (e.part, e.module, glob(e.path) or "(the model)", e.by or e.why or "") for e in entries
    )
    rows = [(str(n), part, cls, at, outcome) for (part, cls, at, outcome), n in counted.items()]
    return [f"    {line}" for line in aligned(rows, (0,))]
