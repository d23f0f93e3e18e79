"""FusionPlan: what was planned, and how people read it."""

from __future__ import annotations

from fuseops.plan.records import Planned
from fuseops.words import size

from .html import fragment, page
from .text import text


class FusionPlan(Planned):
    __doc__ = Planned.__doc__

    def to_html(self) -> str:
        """A self-contained page with a drawing; no network, no script."""
        return page([self])

    def _repr_html_(self) -> str:
        return fragment([self])

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        at = f"of {self.path}: " if self.path else ""
        ran = f"{len(self.fused)} fused, {len(self.misses)} not fused, " if self.forward else ""
        return f"<FusionPlan {at}{ran}saves {size(self.saved_bytes)}>"
