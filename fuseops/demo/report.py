"""The report: one HTML file without script or network, light or dark as the reader's system is."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fuseops.explain import FusionPlan
from fuseops.explain.html import document
from fuseops.words import size

from .charts import Bar, Line, bars, curves, smooth
from .plans import drawings
from .train import History

MORE_STYLE = """
.fuseops h1{margin-bottom:8px}
.fuseops .big{font-weight:600;font-size:17px;margin:28px 0 10px}
.fuseops .chart{max-width:100%;height:auto}
.fuseops svg .label{text-anchor:end;fill:var(--soft)}
.fuseops svg .tick{text-anchor:start;fill:var(--soft)}
.fuseops .chart .rule{stroke:var(--line);fill:none}
.fuseops .chart .curve{fill:none;stroke-width:2;stroke-linejoin:round}
.fuseops .chart .train{stroke:var(--bar);opacity:.75}
.fuseops .chart .judged{stroke:var(--joint);stroke-width:2.6}
.fuseops .chart .bigram{stroke:var(--miss);stroke-dasharray:6 4}
.fuseops .chart .b0{fill:var(--soft)}.fuseops .chart .b1{fill:var(--forward)}
.fuseops .chart .b2{fill:var(--joint)}
.fuseops .legend{display:flex;flex-wrap:wrap;gap:6px 22px;margin:6px 0 0 52px}
.fuseops .legend i{display:inline-block;width:22px;height:3px;margin-right:8px}
.fuseops .legend i{vertical-align:middle}
.fuseops .legend .train{background:var(--bar)}.fuseops .legend .judged{background:var(--joint)}
.fuseops .legend .bigram{background:var(--miss)}
.fuseops .pass{color:var(--joint);font-weight:600}.fuseops .fail{color:var(--miss);font-weight:600}
.fuseops pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.fuseops pre{font:12px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
"""


class Page(NamedTuple):
    """A `Page` holds what the page of the demo shows, section by section."""

    title: str
    facts: Sequence[tuple[str, str]]
    verdicts: Sequence[tuple[bool | None, str]]  # passed, failed, or not enforced
    history: History
    bigram: float
    held_out: float
    saved: Sequence[tuple[str, int]]
    plans: Sequence[FusionPlan]
    sample: str


def write(report: Page, folder: Path) -> Path:
    """Write the page.  -> its absolute path"""
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "report.html").resolve()
    path.write_text(page(report), encoding="utf-8")
    return path


def page(report: Page) -> str:
    """The page as an HTML document."""
    return document(report.title, "".join(_sections(report)), MORE_STYLE)


def _sections(report: Page) -> Iterator[str]:
    yield _section("Checked", _verdicts(report.verdicts) + _table(report.facts))
    yield _section("Loss", _loss(report))
    yield _section("Saved for the backward", _saved(report.saved))
    yield _section("What it writes", f"<pre>{escape(report.sample)}</pre>")
    yield f'<div class="big">Fusion plan</div>\n{drawings(report.plans)}\n'


def _section(title: str, body: str) -> str:
    return f'<div class="big">{escape(title)}</div>\n<section>{body}</section>\n'


def _verdicts(verdicts: Sequence[tuple[bool | None, str]]) -> str:
    words = {True: ("pass", "passed"), False: ("fail", "FAILED"), None: ("quiet", "not enforced")}
    rows: list[Any] = [(*words[passed], text) for passed, text in verdicts]
    cells = (
        f'<tr><td class="{kind}">{word}</td><td>{escape(text)}</td></tr>'
        for kind, word, text in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f'<table style="margin-top:18px">{"".join(cells)}</table>'


def _loss(report: Page) -> str:
    steps = len(report.history.train)
    judged = [*report.history.held_out]
    return curves(
        [
            Line("training text", "train", smooth(report.history.train)),
            Line("a part of the held-out text", "judged", judged),
            Line(
                f"byte bigrams, held-out text: {report.bigram:.3f}",
                "bigram",
                [(0, report.bigram), (steps, report.bigram)],
            ),
        ],
        "steps",
        "nats a byte",
    )


def _saved(saved: Sequence[tuple[str, int]]) -> str:
    first = max(saved[0][1], 1)
    return bars([Bar(label, n, f"{size(n)} ({100 * n / first:.0f} %)") for label, n in saved]) + (
        '<p style="margin:10px 0 0">Bytes on the device between forward and backward of one batch, '
        "beyond the parameters.</p>"
    )
