"""The report: one HTML file without script or network, light or dark as the reader's system is."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from fuseops.explain.charts import ChartBar, ChartLine, bar_chart, image, line_chart
from fuseops.explain.html import cell, document, fragment, table
from fuseops.words import size

from .outcome import Outcome

MORE_STYLE = """
.fuseops h1{margin-bottom:8px}
.fuseops .big{font-weight:600;font-size:17px;margin:28px 0 10px}
.fuseops .pass{color:var(--joint);font-weight:600}.fuseops .fail{color:var(--miss);font-weight:600}
.fuseops table+table{margin-top:18px}
.fuseops pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.fuseops pre{font:12px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
"""
WINDOW = 15  # steps whose mean is drawn: single batches are too noisy to read


def write(outcome: Outcome, folder: Path) -> Path:
    """Write the page.  -> its absolute path"""
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "report.html").resolve()
    page = document("fuseops demo", "".join(_sections(outcome)), MORE_STYLE)
    path.write_text(page, encoding="utf-8")
    return path


def _sections(outcome: Outcome) -> Iterator[str]:
    facts = table(cell(name) + cell(text) for name, text in outcome.facts())
    yield _section("Checked", _verdicts(outcome.verdicts()) + facts)
    yield _section("Loss", _loss(outcome))
    yield _section("Saved for the backward", _saved(outcome.saved()))
    yield _section("What it writes", f"<pre>{escape(outcome.sample)}</pre>")
    yield f'<div class="big">Fusion plan</div>\n{fragment(outcome.plan.plans)}\n'


def _section(title: str, body: str) -> str:
    return f'<div class="big">{escape(title)}</div>\n<section>{body}</section>\n'


def _verdicts(verdicts: Iterable[tuple[bool | None, str]]) -> str:
    words = {True: ("passed", "pass"), False: ("FAILED", "fail"), None: ("not enforced", "quiet")}
    return table(cell(*words[passed]) + cell(text) for passed, text in verdicts)


def _loss(outcome: Outcome) -> str:
    train, bigram = outcome.history.train, outcome.bigram
    steps = len(train)
    means = [statistics.fmean(train[max(0, k - WINDOW) : k]) for k in range(1, steps + 1)]
    lines = [
        ChartLine("training text", [*enumerate(means, 1)], muted=True),
        ChartLine("a part of the held-out text", outcome.history.held_out),
        ChartLine(f"byte bigrams, held-out text: {bigram:.3f}", [(0, bigram), (steps, bigram)]),
    ]
    return image(line_chart("Loss, nats a byte", "by steps", [lines]))


def _saved(saved: Mapping[str, int]) -> str:
    first = max(saved["unfused"], 1)
    bars = [
        ChartBar(how.replace("_and_", ", "), n, f"{size(n)} ({100 * n / first:.0f} %)", "ours")
        for how, n in saved.items()
    ]
    note = "on the device between forward and backward of one batch"
    return image(bar_chart("Bytes beyond the parameters", note, {"": bars}, label_width=120))
