"""docs/measured.md, the figures of the README, and the pictures, so that none is typed or drawn by hand.

python benchmarks/tables.py            # write them
python benchmarks/tables.py --check    # exit 1 where one is stale
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, README = (
    ROOT / "benchmarks" / "results",
    ROOT / "docs" / "measured.md",
    ROOT / "README.md",
)
HUGGINGFACE = ROOT / "docs" / "huggingface.md"
HEAD = """# Measured

Every table is made from a file in `benchmarks/results` by `python benchmarks/tables.py`; the script of the same name
wrote the file, and its docstring says what is timed. Candidates run in turns in one process; figures are medians.
[benchmarks/README.md](../benchmarks/README.md) has the commands, and says how candidates are compared.

- **summary**: of the cells in the file. Ratios are peer's time over ours, so above 1 is faster than the peer;
  `below` counts the cells under the bar of that row.
  One with an interval is the median of the ratios of all rounds, and the interval holds the true one with 95 %.
- **share of copy**: bandwidth over that of a copy of the same bytes in the same run. Peers listed are the faster ones.
- **share of floor**: the same of a kernel that reads and writes those bytes in the proportion of the case, and of an
  empty launch for each launch beyond the first (in files without `mixed`: of the copy).
- **gemms_alone**: of the loss, the ratio to that peer that its three products would have without anything else.
- **settled**: GEMMs of an expert MLP in microseconds, at the clock that each candidate settles at; ratios as above.
- **00, 01, 10, 11**: microseconds of a step of the dense MLP with SwiGLU (first digit) and its backward (second) at the
  end of their GEMMs, 1, or as kernels of their own, 0.
- **two GPUs**: whether a step of two ranks over NCCL gives what the stock model gives, and the largest distance of an
  element over the mean magnitude of its tensor.
- **cells** of `distributed_*`: forward and backward of a layer of experts with 8192 tokens a rank, in microseconds of
  the slowest: the ways of `fuseops.distributed` (`captured`: the first as a CUDA graph) beside a layer as torchtitan
  writes it, and the share of communication in the captured one.
- **step**: forward, loss and backward of a Hugging Face model, stock and after `hf.apply`; the peak is beyond what is
  resident. **bf16**: the error of small models in bf16 over float32, of the logits and of the gradients (median and
  worst), and how many replaced layers wait for the device.
- **ratio** of a way to train: its step over the plain step of the same round, the median of all rounds, with the
  interval that holds the true one with 95 % (of fewer than six rounds, their range).

A file holds what ran; what missed its bar is counted there, and named in the file.
"""
OURS = ("fuseops", "again", "copy", "memcpy", "copy_kernel", "mixed", "idle")  # and what does less
PARTS = ("plans", "exact", "fit", "dry", "beyond", "host")  # figures of several depths
WAY = {
    "peak_gib": "peak GiB",
    "moved_gib": "moved GiB",
    "peak_error": "peak over predicted, less 1",
    "time_error": "time over predicted, less 1",
    "lower_over_predicted": "peak lower / predicted",
    "rounds": "rounds",
}
NEAR = 0.9  # of the bandwidth of a copy
Rows = list[list[str]]


def page() -> str:
    """The whole page."""
    sections = (section(path) for path in sorted(RESULTS.glob("*.json")))
    return "\n\n".join([HEAD.strip(), *filter(None, sections)]) + "\n"


def section(path: Path) -> str:
    """The tables of one file; empty where it holds none that this script knows."""
    result = json.loads(path.read_text(encoding="utf-8"))
    tables = [text for text in map("\n".join, tables_of(result)) if text]
    if not tables:
        return ""
    return "\n\n".join([f"## {path.stem}", provenance(result), *tables])


def provenance(result: Mapping[str, Any]) -> str:
    facts = result.get("environment", result)
    said = (f"{k} {v}" for k, v in facts.items() if type(v) in (str, int) and k != "command")
    return ", ".join(said) + "."


def tables_of(result: Mapping[str, Any]) -> Iterator[Iterator[str]]:
    if isinstance(result.get("summary"), dict) and result["summary"]:
        yield table(summary(result["summary"]))
    if isinstance(result.get("microseconds"), dict):
        yield table(facts("microseconds", result["microseconds"]))
    if isinstance(result.get("small_steps"), dict):
        yield table(keyed("microseconds of the host", result["small_steps"]))
    if isinstance(result.get("recipes"), dict):
        steps = {
            name: step["us"] | {f"{n} over bf16": r for n, r in step["over_bf16"].items()}
            for name, step in result["recipes"].items()
        }
        yield table(keyed("microseconds of the host", steps))
    if isinstance(result.get("bars"), dict):
        yield table(keyed("bar", result["bars"]))
    if isinstance(result.get("runs"), list):
        yield table(keyed("run", {str(i): run for i, run in enumerate(result["runs"], 1)}))
    if isinstance(result.get("bandwidth"), list):
        yield table(bandwidth(result["bandwidth"]))
        if result.get("small"):
            yield table(small(result["small"]))
    for name, value in result.items():
        if isinstance(value, dict) and value and all(is_way(v) for v in value.values()):
            yield table(ways(name, value))
        elif name in ("settled", "cells") and (rows := compared(name, value)):
            yield table(keyed(name, rows))
        elif name == "cells" and isinstance(value, list):
            yield table(keyed("two GPUs", outcomes(value)))
        elif name == "steps" and isinstance(value, dict):
            yield table(keyed("step", whole_steps(value)))
        elif name == "checks" and value and "steps" in result:
            yield table(keyed("bf16", rounding(value)))
        elif name == "memory":
            yield from (table(keyed(f"{model}, MiB", rows)) for model, rows in value.items())
        elif name == "curves":
            yield table(keyed("recipe", value))
        elif name in PARTS and isinstance(value, dict) and value:
            yield table([[name, ""], *([key, cell(v)] for key, v in flat(value))])


def compared(title: str, cells: Any) -> dict[str, dict[str, Any]]:
    """Single calls that ran at their own clock: microseconds, and ratios with their intervals."""
    found = {}
    for name, c in cells.items() if isinstance(cells, dict) else ():
        if "gain" in c:
            found[name] = {"takes": c["takes"], **c["us"], "gain": c["gain"]}
        elif "pj_per_flop" in c:
            rates = {f"{peer}, pJ/FLOP": pj for peer, pj in c["pj_per_flop"].items()}
            found[name] = rates | {f"over {peer}": r for peer, r in c["ratios"].items()}
        elif "ratios" in c and (title == "settled" or name.endswith("/uniform")):
            found[name] = c["us"] | {f"over {peer}": r for peer, r in c["ratios"].items()}
        elif "over_titan" in c:
            found[name] = c["us"] | {n: c[n] for n in ("over_titan", "over_host_counts")}
            if "communication" in c:
                found[name]["communication"] = c["communication"]["share"]
        elif "over_apart" in c:
            found[name] = c["us"]["fwd+bwd"] | {
                f"00 over {n}": r for n, r in c["over_apart"].items()
            }
        elif "mib_beyond" in c:
            found[name] = c["us"] | {f"{n}, MiB": m for n, m in c["mib_beyond"].items()}
            found[name] |= {f"forward_512 over {p}": r for p, r in c["forward_512_over"].items()}
    return found


def outcomes(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What came of each combination, and the largest error, by model."""
    found: dict[str, dict[str, str]] = {}
    for c in cells:
        error = f" {c['largest_error']:.1e}" if c.get("largest_error") else ""
        found.setdefault(c["cell"], {})[c["port"]] = c["outcome"] + error
    return found


def whole_steps(models: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Steps of stock models: milliseconds, peak, and ratios to ours."""
    return {
        f"{model}, {name}": {
            "ms": us / 1e3,
            "peak GiB": m["peak_gib"][name],
            "over fuseops": m.get("over_fuseops", {}).get(name),
        }
        for model, m in models.items()
        for name, us in m.get("us", {}).items()
    }


def rounding(models: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Errors of stock models and of ours over float32, and who waits for the device."""
    return {
        model: {
            **{
                f"{what}, {who}": m[who][what]
                for what in ("logits", "median", "worst")
                for who in ("stock", "fuseops")
            },
            "waits": len(m["waits"]),
        }
        for model, m in models.items()
    }


def flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Figures of nested dicts, but for a machine's and a schedule's own."""
    for key, part in value.items():
        if not isinstance(part, dict):
            yield f"{path}{key}", part
        elif key not in ("machine", "schedule"):
            yield from flat(part, f"{path}{key} ")


def summary(found: Mapping[str, Any]) -> Rows:
    of_rows = all(isinstance(value, dict) and value for value in found.values())
    return keyed("summary", found) if of_rows else facts("summary", found)


def facts(title: str, found: Mapping[str, Any]) -> Rows:
    return [[title, ""], *([name, cell(value)] for name, value in found.items())]


def keyed(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Rows:
    """A line a row, a column for every key that some row has."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    return [
        [title, *columns],
        *([name, *(cell(row.get(key)) for key in columns)] for name, row in rows.items()),
    ]


def bandwidth(cells: Sequence[Mapping[str, Any]]) -> Rows:
    rows = [["case", "rows x columns", "us", "share of copy", "share of floor", "faster peers"]]
    for c in cells:
        us = c.get("us") or {}
        ours = us.get("fuseops") or math.inf
        faster = [name for name, theirs in us.items() if name not in OURS and theirs < ours]
        peers = c.get("faster_peers", faster)
        rows.append([
            c["case"], f"{c['rows']} x {c['columns']}", cell(us.get("fuseops")), cell(c.get("share_of_copy")),
            cell(c.get("share_of_floor")),
            ", ".join(f"{peer} {us[peer]:g}" for peer in peers),
        ])  # fmt: skip
    return rows


def small(cells: Sequence[Mapping[str, Any]]) -> Rows:
    rows = {}
    for c in cells:
        parts = {"host": c.get("host_us", {}), "graph": c.get("graph_us", {})}
        rows[f"{c['case']} {c['rows']} x {c['columns']}"] = {
            f"{part} {name}": us for part, found in parts.items() for name, us in found.items()
        }
    return keyed("small shapes, us a call", rows)


def is_way(value: Any) -> bool:
    """A way to train, as `offload.py` writes it."""
    return isinstance(value, dict) and "ms" in value


def ways(name: str, found: Mapping[str, Mapping[str, Any]]) -> Rows:
    keys = [key for key in WAY if any(key in row for row in found.values())]
    rows = [[name, "step ms", "ratio (interval)", *(WAY[key] for key in keys)]]
    for way, row in found.items():
        ratio = cell(row) if "interval" in row else ""
        rows.append([way, f"{row['ms']:.0f}", ratio, *(cell(row.get(key)) for key in keys)])
    return rows


def cell(value: Any) -> str:
    """A figure as a reader wants it; a ratio with its interval, of a list its items, of a dict how many it holds."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        return " ".join(map(cell, value))
    if isinstance(value, dict) and "interval" in value:
        low, high = value["interval"]
        return f"{value['ratio']:.3f} ({low:.3f}-{high:.3f})"
    return str(len(value)) if isinstance(value, dict) else str(value)


def table(rows: Rows) -> Iterator[str]:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"


def measured(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def readme(text: str) -> str:
    """The README with its figures between the marks `<!-- name: ... -->` and `<!-- end -->`."""
    made_of = {
        "headline": headline(),
        "models": "\n".join(table(models())),
        "figures": "\n".join(table(figures())),
    }
    for name, made in made_of.items():
        block = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda found, made=made: f"{found[1]}\n{made}\n\n{found[2]}", text)
    return text


def headline() -> str:
    env = measured("moe_layer_h200")["environment"]
    step = measured("hf_step_first_h200")["steps"]["qwen3_moe"]
    over = step["over_fuseops"]
    return (
        f"Forward and backward of a Qwen3-MoE of transformers run {over['stock']['ratio']:.1f} times as fast after "
        f"`hf.apply` as before it, and {over['stock_compiled']['ratio']:.1f} times\n"
        f"as fast as compiled by `torch.compile`. A MoE layer runs at {moe_layer()} the speed of the best of\n"
        f"SonicMoE and `torch.compile`. When saved tensors of a stack of MoE blocks go to the host as planned,\n"
        f"{offload('moe')} ([all figures](#measured)).\n"
        f"\n"
        f"Conditions: one {env['gpu']}, bf16, torch {env['torch'].partition('-')[0]}, triton {env['triton']}; "
        "candidates ran in turns in one process;\n"
        f"peaks count what a step adds to what is there before it."
    )


def models() -> Rows:
    """What `hf.apply` replaces in each family, in short: from the table that the tests have written."""
    text = HUGGINGFACE.read_text(encoding="utf-8")
    lines = re.findall(r"^\|(.*)\|$", text[text.index("<!-- replaced -->") :], re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    parts = [title for title in head if title not in ("family", "left to stock")]
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if len(row) == len(head):
            of = dict(zip(head, row, strict=True))
            found.setdefault(tuple("yes" if of[part] else "" for part in parts), []).append(
                of["family"]
            )
    return [["", *parts], *([", ".join(names), *cells] for cells, names in found.items())]


def figures() -> Rows:
    rows = [*model_figures(), *moe_figures(), *kernel_figures(), *offload_figures()]
    return [["what", "beside", "measured"], *rows]


def model_figures() -> Iterator[list[str]]:
    """Of a model of transformers whose modules `hf.apply` has replaced."""
    step = measured("hf_step_first_h200")["steps"]["qwen3_moe"]
    over, peak = step["over_fuseops"], step["peak_gib"]
    yield [
        "Qwen3-MoE of transformers (4 layers, 16k tokens) after `hf.apply`, forward and backward",
        "as it is; the same compiled",
        f"{over['stock']['ratio']:.2f} and {over['stock_compiled']['ratio']:.2f} times its speed; a peak of "
        f"{peak['fuseops']:.1f} instead of {peak['stock']:.1f} and {peak['stock_compiled']:.1f} GiB",
    ]


def moe_figures() -> Iterator[list[str]]:
    layer, mlp = measured("moe_layer_h200"), measured("grouped_mlp_h200")
    saved = [cell["saved_bytes"] for cell in layer["cells"].values() if "saved_bytes" in cell]
    sonic = f"SonicMoE {layer['environment']['sonic-moe']}"
    yield [
        f"MoE layer, forward and backward, {len(steps(layer))} shapes",
        f"the best of {sonic} (default and autotuned tiles) and `torch.compile`",
        f"{moe_layer()} its speed",
    ]
    yield [
        "the same, bytes saved for the backward",
        "SonicMoE; `torch.compile`",
        f"{span(share(saved, 'sonic'))} of SonicMoE's; {span(share(saved, 'compile'))} of compile's",
    ]
    yield [
        f"expert MLP, forward and backward, {len(steps(mlp))} shapes",
        "`torch.compile` over `F.grouped_mm`",
        f"{grouped_mlp()} its speed",
    ]


def kernel_figures() -> Iterator[list[str]]:
    summary = measured("grouped_gemm_h200")["summary"]
    settled = (
        "/settled" if "fwd/torch/settled" in summary else ""
    )  # earlier files have short spans only
    gemm = [summary[f"{kind}/torch{settled}"] for kind in ("fwd", "dgrad", "wgrad")]
    means = ", ".join(f"{found['geomean']:.2f}" for found in gemm)
    least = min(found["least"][-1] for found in gemm)
    yield [
        "grouped GEMM: forward, gradients of input and weight",
        "`F.grouped_mm`",
        f"{means} times its speed (geometric means; least {least:.2f})",
    ]
    fp8 = measured("fp8_h200")["settled"]
    found = {
        kind: times([c["ratios"]["bf16"]["ratio"] for n, c in fp8.items() if f"/{kind}/" in n])
        for kind in ("fwd", "dgrad", "wgrad")
    }
    yield [
        f"the same in FP8 with block scales, operands quantized before, {len(fp8)} products",
        "our own bf16",
        f"{found['fwd']}, {found['dgrad']} and {found['wgrad']} its speed",
    ]
    cells = measured("memory_bound_h200")["bandwidth"]
    near = sum((cell.get("share_of_copy") or 0) >= NEAR for cell in cells)
    behind = sum(bool(cell.get("faster_peers")) for cell in cells)
    yield [
        f"memory-bound kernels, {len(cells)} cases",
        "`torch.compile`, Liger-Kernel, eager torch",
        f"{f'a peer is faster in {behind}' if behind else 'no peer is faster in any'}; "
        f"{near} reach {NEAR} of the bandwidth of a copy",
    ]


def offload_figures() -> Iterator[list[str]]:
    """Beside other ways to train, where the file holds them."""
    dense, moe = measured("offload_dense_h200"), measured("offload_moe_h200")
    if slow := dense.get("others", {}).get("checkpoint"):
        plan = min(
            dense["rounds"].values(), key=lambda plan: abs(plan["peak_gib"] - slow["peak_gib"])
        )
        before = dense["rounds"]["nothing"]["peak_gib"]
        yield [
            f"12 dense blocks that peak at {before:.1f} GiB, held to {plan['peak_gib']:.1f}",
            f"`torch.utils.checkpoint` of every block: {slow['peak_gib']:.1f} GiB, {slow['ratio']:.2f} times the step",
            f"{plan['ratio']:.2f} times the step",
        ]
    if hooks := moe.get("others", {}).get("async hooks"):
        yield [
            "32 MoE blocks, saved tensors to the host",
            f"hooks with `record_stream`: {hooks['peak_gib']:.1f} GiB, {hooks['ratio']:.2f} times the step",
            offload("moe"),
        ]


def steps(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a file says of forward and backward, shape by shape."""
    rows = result["summary"].items()
    return [row for name, row in rows if name.endswith("/fwd+bwd")]


def moe_layer() -> str:
    return times([row["fuseops"]["ratio"] for row in steps(measured("moe_layer_h200"))])


def grouped_mlp() -> str:
    return times([row["eager"]["ratio"] for row in steps(measured("grouped_mlp_h200"))])


def offload(model: str) -> str:
    """What left the device for how much of the step: by the plan that moves most."""
    rounds = measured(f"offload_{model}_h200")["rounds"]
    plan = max(rounds.values(), key=lambda way: way.get("moved_gib", 0))
    return (
        f"the peak falls from {rounds['nothing']['peak_gib']:.1f} to {plan['peak_gib']:.1f} GiB, and the step "
        f"takes {100 * (plan['ratio'] - 1):.1f} % longer"
    )


def share(saved: Sequence[Mapping[str, int]], peer: str) -> list[float]:
    return [cell["fuseops"] / cell[peer] for cell in saved if peer in cell]


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def times(ratios: Sequence[float]) -> str:
    return f"{span(ratios)} times"


def main() -> int:
    from pictures import pictures  # this script's folder is on the path when it runs

    texts = {PAGE: page(), README: readme(README.read_text(encoding="utf-8")), **pictures()}
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: python benchmarks/tables.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
