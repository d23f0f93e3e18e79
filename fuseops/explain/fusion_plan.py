"""FusionPlan: what was planned, and how people read it."""

from __future__ import annotations

from fuseops.plan.records import Planned

from .html import fragment, page
from .text import text


class FusionPlan(Planned):
    __doc__ = Planned.__doc__

    def to_html(self) -> str:
        """A self-contained page with a drawing; no network, no script."""
        return page([self])

    def _repr_html_(self) -> str:
        return fragment(self)

    def __str__(self) -> str:
        return text(self)
