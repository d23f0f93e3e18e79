"""The pictures of the README and of the documentation, from the committed results and from a plan of the code as it is.

`python benchmarks/tables.py` writes them, with the tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from subjects import measured

import fuseops as fo
from fuseops.explain.charts import COLORS, ChartBar, ChartLine, bar_chart, line_chart
from fuseops.explain.drawing import svg
from fuseops.explain.html import STYLE as PAGE

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
LAYERS = {
    "qwen3_30b": "Qwen3-30B-A3B",
    "mixtral": "Mixtral 8x7B",
    "sonic_30b": "30B, 64 experts",
    "sonic_7b": "7B, 128 experts",
}


def pictures() -> dict[Path, str]:
    """Every picture, by its file."""
    return {
        FOLDER / "speed.svg": speed(),
        FOLDER / "memory.svg": memory(),
        FOLDER / "plan.svg": plan(),
        FOLDER / "curves.svg": curves(),
    }


def speed() -> str:
    """Steps of MoE layers beside the best of SonicMoE and torch.compile."""
    groups = {}
    for name, title in LAYERS.items():
        rate = measured("moe_layer_h200")["cells"][name]["tflops"]["fwd+bwd"]
        sonic = max(rate[peer] for peer in ("sonic", "sonic_tuned") if peer in rate)
        found = {"fuseops": rate["fuseops"], "SonicMoE": sonic, "torch.compile": rate["compile"]}
        groups[title] = [
            ChartBar(who, value, f"{value:.0f}", kind)
            for (who, value), kind in zip(found.items(), COLORS, strict=True)
        ]
    return bar_chart(
        "A step of a MoE layer, TFLOP/s", "forward and backward; longer is faster", groups
    )


def memory() -> str:
    """Peaks of steps beside what else bounds them."""
    step = measured("hf_step_h200")["steps"]["qwen3_moe"]
    ways = {"hf.apply": "fuseops", "stock": "stock", "compiled": "stock_compiled"}
    model = [
        ChartBar(label, step["peak_gib"][way], f"{step['peak_gib'][way]:.1f} GiB, {step['us'][way] / 1e3:.0f} ms", kind)
        for (label, way), kind in zip(ways.items(), COLORS, strict=True)
    ]  # fmt: skip
    dense = measured("offload_dense_h200")
    checkpoint, plans = dense["others"]["checkpoint"], dense["rounds"]
    rows = {
        "planned": (plans["plan 11 GiB"], "ours"),
        "planned, tight": (plans["plan 7 GiB"], "ours"),
        "checkpoint": (checkpoint, "peer"),
        "as it is": (plans["nothing"], "other"),
    }
    blocks = [
        ChartBar(label, way["peak_gib"], f"{way['peak_gib']:.1f} GiB, {way['ms']:.0f} ms", kind)
        for label, (way, kind) in rows.items()
    ]
    groups = {"Qwen3-MoE of transformers": model, "12 dense blocks": blocks}
    return bar_chart(
        "Peak memory of a step, and its time", "shorter is less memory", groups, label_width=112
    )


def curves() -> str:
    """Losses of training in bf16 and in FP8."""
    runs = measured("fp8_curves_h200")["models"]["moe12"]["runs"]
    names = {
        "bf16": "bf16, three seeds", "bf16_seed1": "", "bf16_seed2": "", "fp8_square": "FP8",
        "fp8_block": "FP8, direct columns", "fp8_bf16_wgrad": "FP8, bf16 weight gradients",
    }  # fmt: skip
    large = [
        ChartLine(label, _means(runs[name]["train"]), muted=name.startswith("bf16"))
        for name, label in names.items()
    ]
    found = measured("recipe_curves_h200")["runs"]
    recipes = {
        "bf16": "bf16", "float8_block": "FP8, block scaling",
        "float8_current": "FP8, current scaling", "float8_delayed": "FP8, delayed scaling",
        "mxfp8": "MXFP8", "nvfp4": "NVFP4",
    }  # fmt: skip
    small = [
        ChartLine(label, found[f"{name}/0"]["held_out"][2:], muted=name == "bf16")
        for name, label in recipes.items()
    ]
    return line_chart(
        "Loss of training in bf16 and FP8, nats a byte",
        "by steps: 155 M parameters, 12 MoE layers, mean of 50 (left); the demo's model, held-out text (right)",
        (large, small),
    )


def _means(losses: Sequence[float], span: int = 50) -> list[tuple[int, float]]:
    """(last step, mean) of every span of steps behind the first 200."""
    starts = range(200, len(losses), span)
    return [(start + span, statistics.fmean(losses[start : start + span])) for start in starts]


def plan() -> str:
    """The fusion plan of a MoE layer, as `explain()` draws it on a page."""
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
