"""The subjects of docs/measured.md: from which files their figures come, and what they are held to.

The page has the sentences; between its marks stand files, commands, bars and tables, which this makes. Where two files
of a table have the same figure, that of the first is taken: the newer. A file from which nothing is taken goes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cross_entropy
import dense_mlp
import fp8_curves
import fp8_layers
import grouped_mlp
import moe_layer

RESULTS = Path(__file__).resolve().parent / "results"
Rows = list[list[str]]
Found = Mapping[str, Any]
BOTH = ("fwd", "fwd+bwd")


# --- figures as a reader wants them


def cell(value: Any) -> str:
    """A ratio or a median with its interval, of a list its items, of a dict how many it holds."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        return " ".join(map(cell, value))
    if isinstance(value, dict) and "interval" in value:
        middle, digits = (value["ratio"], 3) if "ratio" in value else (value["median"], 0)
        low, high = (f"{end:.{digits}f}" for end in value["interval"])
        return f"{middle:.{digits}f} ({low}-{high})"
    return str(len(value)) if isinstance(value, dict) else str(value)


def keyed(title: str, rows: Mapping[str, Found]) -> Rows:
    """A line a row, a column for every key that some row has."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = ([name, *(cell(row.get(key)) for key in columns)] for name, row in rows.items())
    return [[title, *columns], *lines]


def table(rows: Rows) -> Iterator[str]:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def facts(found: Found) -> dict[str, Found]:
    """A column without a title."""
    return {name: {"": value} for name, value in found.items()}


def turned(rows: Mapping[str, Found]) -> dict[str, dict[str, Any]]:
    """Rows as columns."""
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    return {key: {name: row[key] for name, row in rows.items() if key in row} for key in columns}


def by_last(values: Found, title: str = "{}") -> dict[str, dict[str, Any]]:
    """Of `a/b/what` the rows a/b, with a column for each `what`."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        row, what = name.rsplit("/", 1)
        found.setdefault(row, {})[title.format(what)] = value
    return found


def joined(*tables: Mapping[str, Found]) -> dict[str, dict[str, Any]]:
    """The columns of all of them, row by row."""
    rows = dict.fromkeys(name for table in tables for name in table)
    return {name: {k: v for t in tables for k, v in t.get(name, {}).items()} for name in rows}


def named(title: str, found: Found) -> dict[str, Any]:
    return {title.format(name): value for name, value in found.items()}


# --- files, tables, subjects


@cache
def measured(name: str) -> Found:
    found: Found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def merged(first: Any, *rest: Any) -> Any:
    """Dicts as one; what two have is taken from the first."""
    for other in rest:
        if isinstance(first, Mapping) and isinstance(other, Mapping):
            first = first | {k: merged(first[k], v) if k in first else v for k, v in other.items()}
    return first


class Table:
    """Rows with a title, of the figures of some files, the newest first."""

    def __init__(self, title: str, rows: Callable[[Any], Mapping[str, Found]], *files: str) -> None:
        self.title, self.make, self.files = title, rows, files

    def rows(self, *files: str) -> Rows:
        return keyed(self.title, self.make(self.found(*files)))

    def found(self, *files: str) -> Any:
        return merged(*map(measured, files or self.files))


@dataclass(frozen=True)
class Subject:
    """What the page says of a subject beside its sentences.

    headline: {column} and {row|column} are figures of the first table, from the least to the most; or what says it
    bar, missed: what is held to something, and which figures fall short
    command: of a file that does not say it
    """

    headline: str | Callable[[Any], str]
    tables: tuple[Table, ...]
    bar: str = ""
    missed: Callable[[Any], Found] = lambda found: {}
    command: str = ""

    def files(self) -> list[str]:
        return list(dict.fromkeys(name for table in self.tables for name in table.files))

    def short_of_bar(self) -> Found:
        return self.missed(self.tables[0].found())

    def short(self) -> str:
        if callable(self.headline):
            return self.headline(self.tables[0].found())
        titles, *rows = self.tables[0].rows()

        def figures(match: re.Match[str]) -> str:
            row, _, column = match[1].rpartition("|")
            at = titles.index(column)
            found = (line[at].split()[0] for line in rows if line[at] and row in ("", line[0]))
            return span([float(said) for said in found])

        return re.sub(r"{(.+?)}", figures, self.headline)

    def section(self) -> str:
        parts = ["\n".join(f"- `{name}.json`, {self.source(name)}" for name in self.files())]
        if self.bar:
            missed = "; ".join(
                f"{name} {cell(value)}" for name, value in self.short_of_bar().items()
            )
            said = f"**Missed** by {missed}." if missed else "**Met.**"
            parts.append(textwrap.fill(f"**Bar**: {self.bar}. {said}", 120, break_on_hyphens=False))
        return "\n\n".join([*parts, *("\n".join(table(each.rows())) for each in self.tables)])  # fmt: skip

    def source(self, name: str) -> str:
        """When the file was written, what its machine has otherwise than `COMMON`, and the command."""
        result = measured(name)
        said = {"gpu": result.get("device"), **result.get("environment", result)}
        said["torch"] = said["torch"].replace("+", "-")
        own = [
            f"{k} {said[k]}" for k in (*COMMON, *PEERS) if said.get(k) and said[k] != COMMON.get(k)
        ]
        return f"{', '.join([said['date'], *own])}: `{command(said.get('command', self.command))}`"  # fmt: skip


COMMON = {"gpu": "NVIDIA H200", "torch": "2.11.0-cu130", "triton": "3.6.0", "python": "3.12.3"}
PEERS = ("gpus", "sonic-moe", "liger-kernel", "transformers")


def command(said: str) -> str:
    """As it ran, but for what it wrote and for folders of that machine."""
    said = re.sub(r" --(?:out \S+|resume|budget \S+)", "", said)
    said = re.sub(r"python (?:benchmarks/)?", "python benchmarks/", said)
    return re.sub(r" /\S+", " FOLDER", said)


# --- models, layers, experts


def whole_steps(found: Any) -> dict[str, Found]:
    return {
        f"{model}, {name}": {
            "ms": us / 1e3, "peak GiB": m["peak_gib"][name], "over fuseops": m["over_fuseops"].get(name)
        }
        for model, m in found["steps"].items()
        for name, us in sorted(m["us"].items(), key=lambda item: -item[1])
    }  # fmt: skip


def rounding(found: Any) -> dict[str, Found]:
    return {
        model: {
            f"{what}, {who}": m[who][what]
            for what in ("logits", "median", "worst")
            for who in ("stock", "fuseops")
        }
        | {"waits": len(m["waits"])}
        for model, m in found["checks"].items()
    }


def pick(rows: Mapping[str, Found], key: str) -> dict[str, Any]:
    return {name: row[key] for name, row in rows.items() if key in row}


def layers(found: Any) -> dict[str, Found]:
    rows = found["summary"]
    peers = by_last(pick(rows, "best_peer"), "peer, {}")
    return joined(by_last(pick(rows, "fuseops")), peers, by_last(pick(rows, "of_sonic")))


def layers_missed(found: Any) -> Found:
    rows = found["summary"]
    slow = {n: r["ratio"] for n, r in pick(rows, "fuseops").items() if r["ratio"] < rows[n]["bar"]}
    return slow | {n: r for n, r in pick(rows, "of_sonic").items() if r > rows[n]["bar"]}


def few_tokens(found: Any) -> dict[str, Found]:
    columns = ("fuseops", "over compile", "over sonic", "over copy")
    return joined(*(by_last(pick(found["summary"], c), f"{{}}, {c}") for c in columns))


def experts(found: Any) -> dict[str, Found]:
    cells = found["cells"].items()
    return {name: {what: r["eager"] for what, r in c["ratios"].items()} for name, c in cells}


def below(summary: Mapping[str, Found]) -> dict[str, str]:
    """Of every row with a bar how many cells are under it, and the least."""
    rows = {name: row["below"].values() for name, row in summary.items() if row.get("below")}
    return {n: f"in {len(least)}, at the least {min(least):.3f}" for n, least in rows.items()}


# --- products, FP8


def products(*peers: str) -> Callable[[Any], dict[str, Found]]:
    """Of every layer the ratios of its products to the peers, with rows that are split evenly at random."""

    def rows(found: Any) -> dict[str, Found]:
        records = merged(*(found[part] for part in ("settled", "into", "cells") if part in found))
        even = {
            n.removesuffix("/uniform"): r["ratios"]
            for n, r in records.items()
            if n.endswith("/uniform")
        }
        if len(peers) == 1:
            return by_last(pick(even, *peers))
        ratios = {peer: {n: r["ratio"] for n, r in pick(even, peer).items()} for peer in peers}
        return joined(*(by_last(ratios[peer], f"{{}}, {peer}") for peer in peers))  # fmt: skip

    return rows


def of_cells(*parts: str, **renamed: str) -> Callable[[Any], dict[str, Found]]:
    """Columns of these parts of every cell; those of a renamed part by that title."""

    def row(record: Found) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in parts:
            value = record[part]
            found |= {part: value} if part == "gain" or isinstance(value, str) else value
        for part, title in renamed.items():
            found |= named(title, record[part])
        return found

    return lambda found: {
        name: row(c) for name, c in (found.get("settled") or found["cells"]).items()
    }


by_triton = of_cells("us", ratios="time of {} over 3.6.0")


def passes(found: Any) -> dict[str, Found]:
    return turned(found["summary"])


def passes_missed(found: Any) -> Found:
    bars, *_ = found["summary"].values()
    return {
        f"{layer}/{name}": row[name]["ratio"]
        for layer, row in found["summary"].items()
        for name, bar in bars.items()
        if row is not bars and row[name]["ratio"] < bar
    }


def curves_missed(found: Any) -> Found:
    return {
        f"{model} {run}, {'end' if what == 'end' else 'held out'}": f"{share:.2%}, at most {of['allowed']:.2%}"
        for model, said in found["models"].items()
        for what, of in said["verdict"].items()
        for run, share in of["off"].items()
        if share > of["allowed"]
    }


def fp8_steps(found: Any) -> dict[str, Found]:
    return {n: row for n, row in found["summary"].items() if n.endswith(BOTH)}


def fp8_missed(found: Any) -> Found:
    return {
        f"{cell}, {who}": ratio
        for who, bars in fp8_layers.LEAST.items()
        for cell, bar in bars.items()
        if (ratio := found["summary"][f"{cell}/fwd+bwd"][who]["ratio"]) < bar
    }


def fp8_bytes(found: Any) -> dict[str, Found]:
    rows = {
        n.removesuffix("_bytes"): r for n, r in found["summary"].items() if n.endswith("_bytes")
    }
    whos = dict.fromkeys(who for row in rows.values() for who in row)
    return joined(*(by_last(pick(rows, who), f"{{}}, {who}") for who in whos))  # fmt: skip


def recipes(found: Any) -> dict[str, Found]:
    kinds = ("saved", "peak of a step")
    return joined(*(
        {recipe: {f"{model}, {k}": row[k] for k in kinds if k in row} for recipe, row in rows.items()}
        for model, rows in found["memory"].items()
    ))  # fmt: skip


def recipes_missed(found: Any) -> Found:
    peaks = turned(recipes(found))
    of = {m: peaks[f"{m}, peak of a step"] for m in ("MoE layer", "dense block")}
    return {f"{m}, {r}": p for m, ps in of.items() for r, p in ps.items() if p > ps["bf16"]}


# --- dense, loss, bandwidth


def dense(found: Any) -> dict[str, Found]:
    return {n: r for n, r in dense_mlp.summary(found["cells"]).items() if "ratio" in r}


def dense_missed(found: Any) -> Found:
    rows = dense_mlp.summary(found["cells"])
    return below(rows) | ({} if rows["saved"]["met"] else {"bytes": rows["saved"]["worst"]})


def dense_ways(found: Any) -> dict[str, Found]:
    return {
        name: c["us"]["fwd+bwd"] | named("00 over {}", c["over_apart"])
        for name, c in found["cells"].items()
    }


def of_copy(found: Any) -> dict[str, Found]:
    """Every case, its shapes side by side: its bandwidth over a copy's, and its microseconds."""
    rows: dict[str, dict[str, str]] = {}
    for c in found["bandwidth"]:
        said = c.get("wrong") or f"{c['share_of_copy']:.3f} ({cell(c['us']['fuseops'])})"
        rows.setdefault(c["case"], {})[f"{c['rows']} x {c['columns']}"] = said
    return rows


def near_copies(found: Any) -> str:
    cells, faster = found["bandwidth"], found["summary"]["faster_peers"]
    near = sum(c.get("share_of_copy", 0) >= 0.9 for c in cells)
    peers = f"a peer is faster in {len(faster)}" if faster else "no peer is faster in any"
    return f"{near} of {len(cells)} cases reach 0.9 of a copy's bandwidth; {peers}"


def bandwidth_missed(found: Any) -> Found:
    said = found["summary"]
    return {**said["wrong"], **said["below_bar"], **said["faster_peers"]}


def small_shapes(found: Any) -> dict[str, Found]:
    """Of every candidate, one after another, in a graph and on the host."""
    rows: dict[str, dict[str, str]] = {}
    for part in ("graph", "host"):
        for c in found["small"]:
            us = (c[f"{part}_us"].get(name) for name in ("fuseops", "eager", "compile", "liger"))
            said = " / ".join(cell(value) or "-" for value in us)
            rows.setdefault(c["case"], {})[f"{part}, {c['rows']} rows"] = said
    return rows


def small_steps(found: Any) -> dict[str, Found]:
    steps: dict[str, Found] = found["small_steps"]
    return steps


def under_recipes(found: Any) -> dict[str, Found]:
    return {
        name: step["us"] | {f"{n} over bf16": r["ratio"] for n, r in step["over_bf16"].items()}
        for name, step in found["recipes"].items()
    }


# --- offload

WAY = {
    "peak_gib": "peak GiB", "moved_gib": "moved GiB", "peak_error": "peak over predicted, less 1",
    "time_error": "time over predicted, less 1", "rounds": "rounds",
}  # fmt: skip


def ways(found: Any) -> dict[str, Found]:
    """Plans and the plain step in turn, and other ways to train."""
    return {
        name: {"step ms": f"{row['ms']:.0f}", "over the plain step": row if "interval" in row else None}
        | {title: row.get(key) for key, title in WAY.items()}
        for name, row in {**found["rounds"], **found["others"]}.items()
    }  # fmt: skip


SAVED_US = 25  # of the host, a saved tensor


def of_the_host(found: Any) -> dict[str, Found]:
    """What a saved tensor and one that moves cost the host, in microseconds and in calls, by the ways of a step."""
    return {
        name: {"step us": f"{way['step_us']:.0f}", "saved": way["saved"], "moved": way["moved"]}
        | {f"{key} a tensor {what}": way.get(f"{key}_{what}") for key in ("us", "calls") for what in ("saved", "moved")}
        for name, way in found["ways"].items()
        if way.get("saved")
    }  # fmt: skip


def hosts_missed(found: Any) -> Found:
    us = {
        name: way["us_saved"]["median"] for name, way in found["ways"].items() if way.get("saved")
    }
    return {name: median for name, median in us.items() if median > SAVED_US}


def checked(found: Any) -> dict[str, Found]:
    fit, dry = found["fit"], found["dry"]
    held = next(way for name, way in fit.items() if name.startswith("plan"))
    exact = [
        each
        for way in found["exact"].values()
        for each in (way.values() if isinstance(way, dict) else [way])
    ]
    return facts({
        "gradients equal the plain step's bit for bit, each stream delayed in turn": all(exact),
        f"with {fit['allowed_gib']:.1f} GiB allowed, the plain step": fit["nothing"].partition(".")[0],
        "with as much, the plan": f"{held['ms']:.0f} ms",
        "time of a plan from a dry run, over the step, less 1": dry["time_error"],
        "peak of a plan from a dry run, over the step, less 1": dry["peak_error"],
    })  # fmt: skip


def plans_missed(found: Any) -> Found:
    return {
        name: f"{cell(row['found'])}, {limit} {cell(row[limit])}"
        for name, row in found["bars"].items()
        for limit in ("at most", "at least")
        if limit in row and not row["met"]
    }


def beyond(found: Any) -> dict[str, Found]:
    said = found["beyond"]
    return facts({
        "GiB of the device": said["device_gib"],
        "GiB of parameters": said["parameters_gib"],
        "GiB at the peak of the plain step, predicted": said["predicted_before_gib"],
        "the plain step": said["nothing"].partition(".")[0],
        "GiB at the peak of the plan, and predicted": [said["peak_gib"], said["predicted_peak_gib"]],
        "GiB moved": said["moved_gib"],
        "ms of its step, and predicted": [said["trained"]["ms"], said["predicted_ms"]],
    })  # fmt: skip


# --- several GPUs, tools


def dispatch(found: Any) -> dict[str, Found]:
    return {
        name: c["us"]
        | {n.replace("_", " "): c[n] for n in ("over_titan", "over_host_counts")}
        | {"communication": c["communication"]["share"]}
        for name, c in found["cells"].items()
    }


def dispatch_missed(found: Any) -> Found:
    missed = {}
    for name, row in dispatch(found).items():
        titan, counts, share = (
            found["bars"][b][name] for b in ("over_titan", "over_host_counts", "communication")
        )
        for what, bar in (("over titan", titan), ("over host counts", counts)):
            if row[what]["ratio"] < bar:
                missed[f"{name} {what}"] = f"{row[what]['ratio']:.3f}, at least {bar}"
        if row["communication"] > share:
            missed[f"{name} communication"] = f"{row['communication']}, at most {share}"
    return missed  # fmt: skip


PIPELINE = (
    "peak_gib", "peak_with_offload_gib", "predicted_peak_gib", "to_leave_gib", "left_of_it", "plan_moves_gib_a_step",
    "ms", "ms_with_offload", "step_ratio", "step_ratio_quartiles", "step_ratio_interval", "gradients_bit_equal",
    "repeats_bit_equal",
)  # fmt: skip


def pipeline(found: Any) -> dict[str, Found]:
    rows = turned(found["summary"])
    return {name.replace("_", " "): rows[name] for name in PIPELINE if name in rows}


LAYOUT: dict[str, Callable[[Iterable[Any]], Any]] = {  # the worst of all ranks
    "ms": max, "ms_with_offload": max, "step_ratio": max, "to_leave_gib": min, "left_of_it": min,
    "peak_error_over_moved": max, "stall_not_predicted_ms": max, "copies_stall_not_predicted_ms": max,
    "rate_over_planned": min, "gradients_bit_equal": all,
}  # fmt: skip


BESIDE = {  # what the GPU takes from one kernel to the next, by what is copied meanwhile
    "us_beside_nothing": "us between kernels",
    "us_beside_out": "beside copies out",
    "us_beside_back": "beside copies back",
}


def layout(found: Any) -> dict[str, Found]:
    return {
        "FSDP2" if way == "none" else way.replace("_", " "): {
            name.replace("_", " "): worst(row[name] for row in rows)
            for name, worst in LAYOUT.items()
            if name in rows[0]
        }
        | {
            title: max(row["traces"]["offload"][name] for row in rows)
            for name, title in BESIDE.items()
            if name in rows[0]["traces"]["offload"]
        }
        for way, rows in found["ways"].items()
    }


def weak_scaling(found: Any) -> dict[str, Found]:
    rates = {ranks: row["tokens_s_a_rank"] for ranks, row in found["weak_scaling"].items()}
    return {
        ranks: {"tokens/s a rank": rate, "of one rank's": rate / rates["1"]}
        for ranks, rate in rates.items()
    }


def layout_missed(found: Any) -> Found:
    missed = {}
    for way, row in layout(found).items():
        for name, bar in found["bars"].items():
            value = row[name.replace("_", " ")]
            if value < bar.get("at least", value) or value > bar.get("at most", value):
                missed[f"{way} {name.replace('_', ' ')}"] = value
    return missed


def together(found: Any) -> dict[str, Found]:
    """What came of each combination, and the largest error, by model."""
    rows: dict[str, dict[str, str]] = {}
    for c in found["cells"]:
        error = f" {c['largest_error']:.1e}" if c.get("largest_error") else ""
        rows.setdefault(c["cell"], {})[c["port"]] = c["outcome"] + error
    return rows


def sanitized(found: Any) -> dict[str, Found]:
    rows: dict[str, dict[str, str]] = {}
    for run in found["runs"]:
        said = (
            f"{run['passed']} tests, {run['found']} reports" if run["finished"] else "not finished"
        )
        rows.setdefault(run["group"], {})[run["tool"]] = said
    return rows  # fmt: skip


def slower_with_the_newer(found: Any) -> Found:
    ratios = {name: cell["ratios"]["3.9.0"]["ratio"] for name, cell in found["settled"].items()}
    return {name: ratio for name, ratio in ratios.items() if ratio > 1.01}


def reports(found: Any) -> Found:
    return {f"{run['group']}, {run['tool']}": run["found"] for run in found["runs"] if run["found"]}


def beside_products(found: Any) -> dict[str, Found]:
    return {
        f"{shape}, {way}": {
            "in line": row["us"][f"{way}/in line"],
            **{how: row["over_in_line"][f"{way}/{how}"] for how in ("beside", "memory", "pairs")},
        }
        for shape, row in found["cells"].items()
        for way in ("host_counts", "fixed_capacity")
    }


def experts_over_ranks(*files: str) -> Subject:
    return Subject(
        "{over titan} times the peer's speed",
        (Table("microseconds", dispatch, *files),),
        "of each shape, in the file",
        dispatch_missed,
    )


def offload(plan: str, name: str, command: str) -> Subject:
    return Subject(
        f"a peak of {{{plan}|peak GiB}} instead of {{nothing|peak GiB}} GiB, "
        f"{{{plan}|over the plain step}} times the step; by checkpoint of every block {{checkpoint|peak GiB}} GiB, "
        "{checkpoint|over the plain step} times",
        (Table("way", ways, name), Table("", checked, name)),
        "step, peak and time as predicted, and what leaves (the file lists each)",
        plans_missed,
        command,
    )


SUBJECTS = {
    "Models of transformers": Subject(
        "Qwen3-MoE {qwen3_moe, stock|over fuseops} times as fast as stock, {qwen3_moe, stock_compiled|over fuseops} as "
        "compiled; Llama {llama, stock|over fuseops}, {llama, stock_compiled|over fuseops}, and "
        "{llama, liger|over fuseops} as Liger",
        (
            Table("step", whole_steps, "hf_step_h200", "hf_step_fp8_h200", "hf_step_llama_h200"),
            Table("error of bf16", rounding, "hf_step_h200"),
        ),
    ),
    "A MoE layer": Subject(
        "{fwd} times the speed of the best of SonicMoE and `torch.compile` forward, {fwd+bwd} with the backward; "
        "{saved} of SonicMoE's bytes",
        (
            Table("layer", layers, "moe_layer_h200"),
            Table("layer/tokens", few_tokens, "moe_layer_short_h200", "moe_layer_short_sonic_h200"),
        ),
        f"forward {span([*moe_layer.LEAST['fwd'].values()])}, with the backward "
        f"{span([*moe_layer.LEAST['fwd+bwd'].values()])} of the best peer's speed, at most {moe_layer.SAVED} "
        "of SonicMoE's bytes",
        layers_missed,
    ),
    "The peak of a MoE layer": Subject(
        "{peak GiB} GiB instead of {before GiB}, {planned over peak} of it planned",
        (Table("", lambda found: found["summary"], "moe_peak_qwen3_30b_h200", "moe_peak_h200"),),
    ),
    "The MLP of experts": Subject(
        "{fwd} times the speed of `torch.compile` over `F.grouped_mm` forward, {fwd+bwd} with the backward",
        (Table("over compile", experts, "grouped_mlp_forms_h200", "grouped_mlp_h200"),),
        f"at least {grouped_mlp.LEAST} and {grouped_mlp.MEAN} in the mean; {', '.join(grouped_mlp.ALONE)} at least "
        f"{grouped_mlp.BARS['fwd']} forward and {grouped_mlp.BARS['fwd+bwd']} with the backward",
        lambda found: below(grouped_mlp.summary(found["cells"])),
    ),
    "Grouped GEMMs in bf16": Subject(
        "forward {fwd}, dgrad {dgrad}, wgrad {wgrad} times `F.grouped_mm`",
        (
            Table("over `F.grouped_mm`", products("torch"), "grouped_gemm_h200"),
            Table("over dense", products("dense"), "grouped_gemm_h200"),
            Table("microseconds", lambda found: turned(found["host"]), "grouped_gemm_h200"),
        ),
        "as fast as `F.grouped_mm`, 1.3 times where it adds in float32; 0.97 of dense from 1024 rows a group on, "
        "0.88 with Zipf's law",
        lambda found: below(found["summary"]),
    ),
    "Back through SwiGLU inside of a GEMM": Subject(
        "one kernel {gain} times as fast as two",
        (Table("experts", of_cells("takes", "us", "gain"), "grouped_dswiglu_h200"),),
    ),
    "Joules of a GEMM": Subject(
        "{rate over torch} times the rate of `F.grouped_mm`",
        (Table("pJ a FLOP", of_cells("pj_per_flop", ratios="rate over {}"), "energy_h200"),),
    ),
    "Layers in FP8": Subject(
        "{fp8} times our bf16, {fp8_kept} with kept weights",
        (
            Table("over bf16", fp8_steps, "fp8_layers_h200", "fp8_layers_torchao_h200"),
            Table("bytes over bf16's", fp8_bytes, "fp8_layers_h200"),
        ),
        f"{span([*fp8_layers.LEAST['fp8'].values()])} times bf16's speed forward and backward, "
        f"{span([*fp8_layers.LEAST['fp8_kept'].values()])} with kept weights, each layer its own",
        fp8_missed,
    ),
    "Grouped GEMMs in FP8": Subject(
        "forward {fwd}, dgrad {dgrad}, wgrad {wgrad} times our bf16",
        (
            Table("over our bf16", products("bf16"), "fp8_h200", "fp8_into_h200"),
            Table("over", products("torch_bf16", "dense_fp8", "torch_fp8"), "fp8_h200"),
        ),
    ),
    "Passes that quantize": Subject(
        "{mixtral} of a copy's bandwidth",
        (
            Table("pass", passes, "fp8_passes_h200"),
            Table("pass, on an H100", passes, "fp8_passes_h100"),
        ),
        "that of its row",
        passes_missed,
    ),
    "Losses of training in FP8": Subject(
        "{end over bf16, %} % above bf16 at the end",
        (
            Table("run", lambda found: found["curves"], "fp8_curves_h200"),
            Table("recipe", lambda found: found["curves"], "recipe_curves_h200"),
        ),
        f"of FP8 no more above bf16 than its seeds differ, or {fp8_curves.TOLERANCE:.1%}",
        curves_missed,
    ),
    "Memory under recipes": Subject(
        "MoE layer {MoE layer, peak of a step} MiB at the peak, bf16 {bf16|MoE layer, peak of a step}",
        (Table("MiB", recipes, "recipe_memory"),),
        "no peak of the MoE layer or the dense block above bf16's",
        recipes_missed,
    ),
    "The dense MLP": Subject(
        "{ratio} times the best peer's speed",
        (
            Table("step over the best peer", dense, "dense_mlp_512_h200", "dense_mlp_h200"),
            Table("the same, on an H100", dense, "dense_mlp_512_h100"),
            Table("microseconds", dense_ways, "dense_mlp_ways_h200", "dense_mlp_ways_512_h200"),
        ),
        f"from 8192 rows on {dense_mlp.LEAST} times the best peer's speed, at most {dense_mlp.SAVED} of the bytes that "
        "`torch.compile` saves",
        dense_missed,
    ),
    "The loss of a head": Subject(
        "{forward_512 over compile} of compile's speed, {forward_512 over liger} times Liger's",
        (
            Table(
                "tokens/classes",
                of_cells("us", mib_beyond="{}, MiB", forward_512_over="forward_512 over {}"),
                "cross_entropy_32k_128k_h200", "cross_entropy_32k_vocabs_h200", "cross_entropy_h200",
            ),
        ),
        "; ".join(f"{ours} at least {least:.2f} of {peer}" for (ours, peer), (least, _) in cross_entropy.BARS.items()),
        lambda found: below(cross_entropy.summary(found["cells"])),
    ),
    "Memory-bound kernels": Subject(
        near_copies,
        (
            Table("of copy (microseconds)", of_copy, "memory_bound_h200"),
            Table("fuseops / eager / compile / Liger", small_shapes, "memory_bound_h200"),
        ),
        "0.9 of the bandwidth of a copy, and no peer faster",
        bandwidth_missed,
    ),
    "An op without a kernel": Subject(
        "{over op_by_op} times op by op, {over compile} of compile",
        (Table("microseconds", of_cells("us", over="over {}"), "pointwise_h200"),),
    ),
    "The host of small steps": Subject(
        "{eager ratio} of eager torch's time, {compiled ratio} of compile's when both are compiled",
        (
            Table("microseconds of the host", small_steps, "host_h200"),
            Table("of an H100's host", small_steps, "host_h100"),
            Table("backward in the caller's thread", small_steps, "host_one_thread_h200"),
            Table("under recipes", under_recipes, "host_recipes_h200"),
            Table("on a CPU, microseconds", lambda found: facts(found["microseconds"]), "overhead"),
        ),
    ),
    "Saved tensors to the host: dense blocks": offload(
        "plan 7 GiB", "offload_dense_h200", "python offload.py --seconds 22 --steps 2"
    ),
    "Saved tensors to the host: MoE blocks": offload(
        "plan carried", "offload_moe_h200", "python offload.py --model moe --seconds 40"
    ),
    "What a saved tensor costs the host": Subject(
        "",
        (Table("scheduler", of_the_host, "offload_host_h200"),),
        f"at most {SAVED_US} us a saved tensor",
        hosts_missed,
    ),
    "A model that does not fit": Subject(
        "",
        (Table("", beyond, "offload_beyond_h200"),),
        command="python offload.py --parts beyond --blocks 88",
    ),
    "Planned and measured peaks of a model of transformers": Subject(
        "{ratio} of the planned peak",
        (Table("budget", lambda found: found["peaks"], "offload_hf_h200"),),
    ),
    "Experts over two GPUs": experts_over_ranks("distributed_h200x2", "distributed_qwen3_30b_h200x2"),
    "Experts over four GPUs": experts_over_ranks("distributed_h200x4"),
    "Transfers of experts beside products": Subject(
        "", (Table("microseconds", beside_products, "expert_overlap_h200x2"),)
    ),
    "Mixed layers over GPUs with offload": Subject(
        "",
        (
            Table("two GPUs", layout, "layout_fsdp_h200x2", "layout_experts_h200x2"),
            Table(
                "four GPUs, steps waited for", layout, "layout_fsdp_h200x4", "layout_experts_h200x4"
            ),
            Table("stages 2 x virtual 2 x experts 2", layout, "layout_reference_h200x4"),
            Table("ranks, experts over all", weak_scaling, "layout_reference_h200x4"),
        ),
        "of each figure, in the file",
        layout_missed,
    ),
    "A pipeline of two GPUs with offload": Subject("", (Table("", pipeline, "pipeline_h200x2"),)),
    "What was tried together on two GPUs": Subject("", (Table("", together, "ports_nccl_h200x2"),)),
    "Two releases of Triton": Subject(
        "3.9 takes {time of 3.9.0 over 3.6.0} of the older one's time",
        (
            Table("microseconds", by_triton, "tritons_h200"),
            Table("the same, on an H100", by_triton, "tritons_h100"),
        ),
        "at most 1.01 of the older one's time",
        slower_with_the_newer,
    ),
    "Kernels under compute-sanitizer": Subject(
        "",
        (
            Table("triton 3.6.0", sanitized, "sanitize_h200"),
            Table("what changed since", sanitized, "sanitize_on_device_h200"),
            Table("triton 3.9.0", sanitized, "sanitize_triton39_h200"),
            Table("triton 3.6.0, on an H100", sanitized, "sanitize_h100"),
        ),
        "no report",
        reports,
    ),
}  # fmt: skip


# --- the page


MARK = "<!-- from here on by benchmarks/tables.py -->"


def page(text: str) -> str:
    """docs/measured.md with new figures behind the sentences of each section, in short behind the first ones."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    titles = [part.partition("\n")[0].removeprefix("## ") for part in parts[1:]]
    if titles != list(SUBJECTS):
        raise ValueError(f"sections are {titles}, subjects are {list(SUBJECTS)}")
    made = ["\n".join(table(overview())), *(subject.section() for subject in SUBJECTS.values())]
    filled = (
        f"{part.partition(MARK)[0]}{MARK}\n\n{of}" for part, of in zip(parts, made, strict=True)
    )
    return "\n\n".join(filled) + "\n"


def overview(titles: Iterable[str] = SUBJECTS, page: str = "") -> Rows:
    """Of these subjects their headlines, and whether their bars are met.   page: where their sections stand"""
    rows = [["subject", "measured", "bar"]]
    for title in titles:
        subject = SUBJECTS[title]
        met = "" if not subject.bar else "missed" if subject.short_of_bar() else "met"
        anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        rows.append([f"[{title}]({page}#{anchor})", subject.short(), met])
    return rows
