"""The pictures of the README and of the documentation, from the committed results and from a plan of the code as it is.

`python benchmarks/tables.py` writes them, with the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
WIDTH, LABEL, BAR, ROW, EDGE = 470, 118, 15, 19, 14
COLORS = {"ours": "#0f766e", "peer": "#8c9bb0", "other": "#c6cfdb"}
STYLE = (
    "text{font:13px system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;fill:#1b2430}"
    ".title{font-size:15px;font-weight:600}.soft{fill:#5d6b7c;font-size:12px}.name{font-weight:600}"
)
LAYERS = {
    "qwen3_30b": "Qwen3-30B-A3B",
    "mixtral": "Mixtral 8x7B",
    "sonic_30b": "30B, 64 experts",
    "sonic_7b": "7B, 128 experts",
}


class Bar(NamedTuple):
    """A bar: what it stands for, how long it is, what is written at its end."""

    label: str
    value: float
    text: str
    kind: str


def pictures() -> dict[Path, str]:
    """Every picture, by its file."""
    return {
        FOLDER / "speed.svg": speed(),
        FOLDER / "memory.svg": memory(),
        FOLDER / "plan.svg": plan(),
    }


def speed() -> str:
    """Steps of MoE layers beside the best of SonicMoE and torch.compile."""
    groups = {}
    for name, title in LAYERS.items():
        rate = _result("moe_layer_h200")["cells"][name]["tflops"]["fwd+bwd"]
        sonic = max(rate[peer] for peer in ("sonic", "sonic_tuned") if peer in rate)
        found = {"fuseops": rate["fuseops"], "SonicMoE": sonic, "torch.compile": rate["compile"]}
        groups[title] = [
            Bar(who, value, f"{value:.0f}", kind)
            for (who, value), kind in zip(found.items(), COLORS, strict=True)
        ]
    return chart("A step of a MoE layer, TFLOP/s", "forward and backward; longer is faster", groups)


def memory() -> str:
    """Peaks of steps beside what else bounds them."""
    step = _result("hf_step_first_h200")["steps"]["qwen3_moe"]
    ways = {"hf.apply": "fuseops", "stock": "stock", "compiled": "stock_compiled"}
    model = [
        Bar(label, step["peak_gib"][way], f"{step['peak_gib'][way]:.1f} GiB, {step['us'][way] / 1e3:.0f} ms", kind)
        for (label, way), kind in zip(ways.items(), COLORS, strict=True)
    ]  # fmt: skip
    dense = _result("offload_dense_h200")
    checkpoint, plans = dense["others"]["checkpoint"], dense["rounds"]
    rows = {
        "planned": (plans["plan 11 GiB"], "ours"),
        "planned, tight": (plans["plan 7 GiB"], "ours"),
        "checkpoint": (checkpoint, "peer"),
        "as it is": (plans["nothing"], "other"),
    }
    blocks = [
        Bar(label, way["peak_gib"], f"{way['peak_gib']:.1f} GiB, {way['ms']:.0f} ms", kind)
        for label, (way, kind) in rows.items()
    ]
    groups = {"Qwen3-MoE of transformers": model, "12 dense blocks": blocks}
    return chart("Peak memory of a step, and its time", "shorter is less memory", groups, room=112)


def chart(title: str, note: str, groups: Mapping[str, Sequence[Bar]], room: int = 40) -> str:
    """Groups of bars, one under the other; `room` is for what stands at the end of the longest."""
    longest = max(bar.value for bars in groups.values() for bar in bars)
    scale = (WIDTH - LABEL - room - 2 * EDGE) / longest
    y, parts = 62.0, []
    for group, bars in groups.items():
        parts.append(f'<text class="name" x="{EDGE}" y="{y:.0f}">{escape(group)}</text>')
        y += 8
        for bar in bars:
            end, middle = LABEL + EDGE + bar.value * scale, y + BAR - 3
            parts += [
                f'<text class="soft" x="{LABEL + EDGE - 8}" y="{middle:.0f}" text-anchor="end">'
                f"{escape(bar.label)}</text>",
                f'<rect x="{LABEL + EDGE}" y="{y:.0f}" width="{bar.value * scale:.1f}" height="{BAR}" rx="2" '
                f'fill="{COLORS[bar.kind]}"/>',
                f'<text x="{end + 6:.1f}" y="{middle:.0f}">{escape(bar.text)}</text>',
            ]
            y += ROW
        y += 22
    head = (
        f'<text class="title" x="{EDGE}" y="24">{escape(title)}</text>'
        f'<text class="soft" x="{EDGE}" y="42">{escape(note)}</text>'
    )
    return _file(WIDTH, y - 18, f"{title}: {note}", head + "".join(parts))


def _file(width: float, height: float, title: str, body: str) -> str:
    frame = f'x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d5dce4"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<rect {frame}/>{body}</svg>\n"
    )


def plan() -> str:
    """The fusion plan of a MoE layer, as `explain()` draws it on a page."""
    import torch

    import fuseops as fo
    from fuseops.explain.drawing import svg
    from fuseops.explain.html import STYLE as PAGE

    found = fo.MoE(256, 128, num_experts=16, top_k=4).plan(torch.randn(64, 256, requires_grad=True))
    inner = svg(found)
    width, height = (
        float(inner.split(f'{side}="')[1].split('"')[0]) for side in ("width", "height")
    )
    placed = inner.replace("<svg ", '<svg x="16" y="14" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fuseops" width="{width + 32:.0f}" '
        f'height="{height + 28:.0f}" viewBox="0 0 {width + 32:.0f} {height + 28:.0f}"><style>{PAGE}</style>'
        f'<rect x="0.5" y="0.5" width="{width + 31:.0f}" height="{height + 27:.0f}" rx="8" '
        f'style="fill:var(--paper);stroke:var(--line)"/>{placed}</svg>\n'
    )


def _result(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
