"""The plan of one Sequential, and the explanation of a whole model, as text, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fuseops.arguments import as_path, instance_of
from fuseops.plan.records import SCHEMA_VERSION, Planned
from fuseops.words import size

from .html import fragment, page
from .text import report, text


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
        ran = f"{len(self.fused)} fused, {len(self.not_fused)} not fused, " if self.forward else ""
        return f"<FusionPlan {at}{ran}saves {size(self.saved_bytes)}>"


class Explanation(str):
    """An explanation says what ran fused, what did not and why, and what was saved: a `str`, whose text the terminal
    shows.

    A notebook shows the same plans as HTML, with drawings; programs read them from `plans` or `to_json()`.

    plans: the FusionPlan of every Sequential that runs inside no other one, and of what is saved outside of them.
    """

    plans: tuple[FusionPlan, ...]

    def __new__(cls, plans: Sequence[FusionPlan], shown: str | None = None) -> Self:
        """shown: its text; by default that of a whole model, with a summary in the first line"""
        explanation = super().__new__(cls, report(plans) if shown is None else shown)
        explanation.plans = tuple(plans)
        return explanation

    def __repr__(self) -> str:
        return str(self)

    def __getnewargs__(self) -> Any:  # of copies and pickles
        return self.plans, str(self)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward beyond the parameters, shared storage counted once."""
        return sum(plan.saved_bytes for plan in self.plans)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a schema_version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "saved_bytes": self.saved_bytes,
            "plans": [plan.to_json() for plan in self.plans],
        }

    def to_html(self, title: str = "Fusion plan") -> str:
        """A self-contained page with a drawing of every plan; no network, no script."""
        instance_of(title, str, "Explanation.to_html(title)", "a text")
        return page(self.plans, title)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html()` to a file."""
        as_path(path, "Explanation.save_html(path)").write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return fragment(self.plans)
