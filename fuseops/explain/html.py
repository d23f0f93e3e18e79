"""Plans as HTML: one self-contained page for a model, or the fragment that a notebook shows for a plan.

There is no script, network access or image file: style sheet and SVG are inline, so that a report still opens in ten
years.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from fuseops.plan.records import Planned
from fuseops.words import size

from .drawing import svg
from .layout import (
    Group,
    SavedRow,
    fused_and_missed,
    groups,
    is_outside,
    peak_label,
    saved_rows,
    sections,
    shape_of,
    summary,
)

STYLE = """
.fuseops{--ink:#1b2430;--soft:#5d6b7c;--line:#d5dce4;--paper:#fff;--back:#f3f5f8;--op:#f7f9fb;
--node:#e9eef5;--joint:#0f766e;--forward:#2457c5;--backward:#8a3ffc;--on:#fff;--miss:#b45309;
--missback:#fff7e8;--bar:#7aa7e9;color-scheme:light;color:var(--ink);
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
font:14px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
@media (prefers-color-scheme:dark){
.fuseops{--ink:#e4e9f0;--soft:#9aa8b8;--line:#36414f;--paper:#1a212b;--back:#10151c;--op:#232c38;
--node:#26313f;--joint:#2dd4bf;--forward:#7aa7ff;--backward:#c4a0ff;--on:#0d1218;--miss:#fbbf5d;
--missback:#2c2415;--bar:#4470b5;color-scheme:dark}}
.fuseops *{box-sizing:border-box}
body.fuseops{margin:0;background:var(--back)}
.fuseops main{max-width:1120px;margin:0 auto;padding:32px 24px 56px}
.fuseops h1{font-size:22px;line-height:1.25;margin:0 0 4px}
.fuseops h2{font:600 15px/1.4 var(--mono);margin:0;overflow-wrap:anywhere;color:var(--ink)}
.fuseops h3{font-size:12px;font-weight:600;color:var(--soft);margin:18px 0 6px}
.fuseops p{margin:0 0 20px;color:var(--soft)}
.fuseops section{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:18px 20px;margin:0 0 16px}
.fuseops section>h3:first-child{margin-top:0}
.fuseops section section{background:none;margin:16px 0 0}
.fuseops header{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:baseline;
justify-content:space-between}
.fuseops .facts{color:var(--soft);font-size:13px}
.fuseops .facts b{color:var(--ink);font-weight:600}
.fuseops .draw{overflow-x:auto;margin:16px 0 0;padding:2px 0 6px}
.fuseops svg{display:block}
.fuseops svg text{text-anchor:middle;dominant-baseline:central;fill:var(--ink);font-size:12px}
.fuseops svg .axis{text-anchor:end;fill:var(--soft);font-size:11px}
.fuseops svg .name{font-weight:600}
.fuseops svg .kind{fill:var(--soft);font-size:11px}
.fuseops svg .inside{fill:var(--on);font-weight:600}
.fuseops svg .missed{fill:var(--miss);font-size:11px}
.fuseops .node{fill:var(--node)}
.fuseops .arrow{stroke:var(--soft);fill:none;stroke-width:1.2}
.fuseops .op{fill:var(--op);stroke:var(--line);stroke-width:1.2}
.fuseops .op.module,.fuseops .op.plain,.fuseops .op.call{stroke-dasharray:4 3;stroke:var(--soft)}
.fuseops .span.joint{fill:var(--joint)}
.fuseops .span.forward{fill:var(--forward)}
.fuseops .span.backward{fill:var(--backward)}
.fuseops .span.single{fill:var(--line)}
.fuseops .miss{fill:var(--missback);stroke:var(--miss);stroke-dasharray:3 3}
.fuseops table{border-collapse:collapse;font-size:13px;margin:0;color:var(--ink)}
.fuseops td{padding:4px 24px 4px 0;text-align:left;vertical-align:top;background:none;
border:0;border-top:1px solid var(--line)}
.fuseops tr:first-child>td{border-top:0}
.fuseops .bars{width:100%}
.fuseops .bars td:last-child{padding-right:0}
.fuseops .mono{font-family:var(--mono);font-size:12px;overflow-wrap:anywhere}
.fuseops .quiet{color:var(--soft)}
.fuseops td.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.fuseops .share{width:30%;min-width:90px;vertical-align:middle}
.fuseops .share i{display:block;height:10px;border-radius:3px;background:var(--bar);min-width:2px}
.fuseops .rule{white-space:nowrap;font-weight:600}
.fuseops .rule.lost{color:var(--miss)}
.fuseops ul{margin:0;padding-left:18px;font-size:13px}
.fuseops .tiles{display:flex;flex-wrap:wrap;gap:12px;margin:0 0 16px}
.fuseops .tiles div{flex:1 1 220px;background:var(--paper);border:1px solid var(--line);
border-radius:10px;padding:12px 16px;color:var(--soft);font-size:13px}
.fuseops .tiles b{display:block;font-size:22px;line-height:1.3;color:var(--ink);font-weight:600}
@media(max-width:560px){
.fuseops main{padding:18px 10px 32px}
.fuseops section{padding:14px 12px}
.fuseops td{padding-right:10px}
.fuseops .mono{overflow-wrap:break-word}
.fuseops .list tr{display:flex;flex-wrap:wrap;gap:0 10px;padding:5px 0;border-top:1px solid var(--line)}
.fuseops .list tr:first-child{border-top:0}
.fuseops .list td{border:0;padding:0}
.fuseops .bars tr{display:grid;grid-template-columns:1fr auto;padding:5px 0;border-top:1px solid var(--line)}
.fuseops .bars tr:first-child{border-top:0}
.fuseops .bars td{border:0;padding:0}
.fuseops .bars td:first-child,.fuseops .bars .share{grid-column:1/-1;width:auto}
}
"""


def page(plans: Sequence[Planned], title: str = "Fusion plan") -> str:
    """A whole document for the plans of a model; equal ones share a section."""
    sections = "\n".join(_section(group) for group in groups(plans))
    fused, missed = fused_and_missed(plans)
    numbers = tiles(
        [
            (f"{fused} fused", f"{missed} not fused, each with its reason below"),
            (size(sum(plan.saved_bytes for plan in plans)), "saved for the backward"),
        ]
    )
    return document(title, f"<p>{escape(summary(plans))}</p>\n{numbers}{sections}")


def document(title: str, body: str, more_style: str = "") -> str:
    """A whole document.   title: text; body: HTML"""
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}{more_style}</style>\n</head>\n"
        f'<body class="fuseops">\n<main>\n<h1>{name}</h1>\n{body}\n</main>\n</body>\n</html>\n'
    )


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    """Tiles with large numbers and their descriptions, from (number, description)."""
    return f'<div class="tiles">{"".join(f"<div><b>{escape(n)}</b>{escape(what)}</div>" for n, what in numbers)}</div>'


def table(rows: Iterable[str], style: str = "", head: str = "") -> str:
    """A table.   rows: the cells of each, as `cell` makes them; head: the cells of the titles"""
    named = f' class="{style}"' if style else ""
    titles = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table{named}>{titles}<tbody>{body}</tbody></table>"


def cell(text: str, style: str = "", kind: str = "td") -> str:
    """A cell of a table.   text: not HTML; kind: "th" for a title"""
    named = f' class="{style}"' if style else ""
    return f"<{kind}{named}>{escape(text)}</{kind}>"


def fragment(plans: Sequence[Planned]) -> str:
    """The HTML of plans for any page; equal ones share a section."""
    sections = "".join(map(_section, groups(plans)))
    return f'<div class="fuseops"><style>{STYLE}</style>{sections}</div>'


def _section(group: Group) -> str:
    return f"<section>{''.join(_parts(group))}</section>"


def _parts(group: Group) -> Iterator[str]:
    plan = group.plan
    title = "outside of every Sequential" if is_outside(plan) else group.title
    yield f'<header><h2>{escape(title)}</h2><span class="facts">{_facts(group)}</span></header>'
    if plan.forward:
        yield f'<div class="draw">{svg(plan)}</div>'
    yield from _fused(plan)
    yield from _sections(plan)
    yield from _saved(saved_rows(group))
    if plan.notes:
        yield f"<h3>Notes</h3><ul>{''.join(f'<li>{escape(note)}</li>' for note in plan.notes)}</ul>"
    for nested in groups(plan.nested):
        yield _section(nested)


def _facts(group: Group) -> str:
    plan = group.plan
    each = " each" if len(group.paths) > 1 else ""
    facts = [f"saves <b>{size(plan.saved_bytes)}</b>{each}"]
    if plan.forward:
        facts = [
            f"<b>{len(plan.fused)}</b> fused",
            f"<b>{len(plan.not_fused)}</b> not fused",
            *facts,
            f"<b>{size(plan.peak_bytes)}</b> {peak_label(plan)}",
        ]
    return " &nbsp; ".join(facts)


def _fused(plan: Planned) -> Iterator[str]:
    rows = [
        cell(s.rule or "", "rule")
        + cell(s.kind, "quiet")
        + cell(", ".join(s.ops), "mono")
        + cell(f"runs as {s.runs}")
        for s in plan.fused
    ]
    if rows:
        yield f"<h3>Fused</h3>{table(rows, 'list')}"


def _sections(plan: Planned) -> Iterator[str]:
    for title, styles, rows in sections(plan):
        cells = ["".join(map(cell, row, styles)) for row in rows]
        yield f"<h3>{title[0].upper()}{title[1:]}</h3>{table(cells, 'list')}"


def _saved(rows: Sequence[SavedRow]) -> Iterator[str]:
    if not rows:
        return
    most = max(row.nbytes for row in rows)
    bars = table([_saved_row(row, most) for row in rows], "bars")
    yield f"<h3>Saved for the backward</h3>{bars}"


def breakable(name: str) -> str:
    """An escaped dotted name, whose lines may break at a dot that no number follows."""
    return re.sub(r"\.(?=[A-Za-z])", ".<wbr>", escape(name))


def _saved_row(row: SavedRow, most: int) -> str:
    tensor = row.tensor
    times = f' <span class="quiet">{row.times} times</span>' if row.times > 1 else ""
    number, last = row.amount, ""
    if row.nbytes:
        last = f'<i style="width:{100 * row.nbytes / most:.1f}%"></i>'
    else:
        number = f'<span class="quiet">{number}</span>'
        if row.times == 1:
            last = f'<span class="quiet mono">{escape(tensor.shared_with or "")}</span>'
    return (
        f'<td class="mono">{breakable(row.name)}{times}</td>{cell(shape_of(tensor), "mono quiet")}'
        f'<td class="number">{number}</td><td class="share">{last}</td>'
    )
