"""docs/measured.md and the README say what the committed results say."""

import argparse
import ast
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import re
import types
from collections import Counter
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from fuseops.explain.charts import ChartBar, bar_chart

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import each other, as when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def tables() -> Any:
    return loaded("tables")


def subjects() -> Any:
    return importlib.import_module("subjects")


@functools.cache
def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


with pytest.MonkeyPatch.context() as at_collection:
    at_collection.syspath_prepend(str(BENCHMARKS))
    recipe_memory = loaded("recipe_memory")


def measure() -> Any:
    return importlib.import_module("common.measure")


@pytest.fixture
def memory_bound() -> Any:
    return loaded("memory_bound")


@pytest.fixture
def grouped_gemm() -> Any:
    return loaded("grouped_gemm")


@pytest.mark.parametrize("recipe", [name for name in recipe_memory.RECIPES if name != "bf16"])
@pytest.mark.parametrize("model", ["MoE layer", "dense block"])
def test_no_recipe_saves_more_or_plans_a_higher_peak_than_bf16(
    model: str, recipe: str, tmp_path: Path
) -> None:
    """Beside kept weights, in a process of its own. With an FP8 h at most 0.55 is saved beyond the input."""
    out = tmp_path / "found.json"
    script = str(BENCHMARKS / "recipe_memory.py")
    ran = fresh.run(script, "--out", str(out), "--models", model, "--recipes", "bf16", recipe)
    assert not ran.returncode, ran.stderr
    by_recipe = json.loads(out.read_text())["memory"][model]
    found, high = by_recipe[recipe], by_recipe["bf16"]
    for what in ("saved", "peak of a step"):
        assert found[what] <= high[what], what
    if "hidden" in recipe:
        assert found["saved beyond the input"] <= 0.55 * high["saved beyond the input"]


def test_a_run_that_was_cut_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a file holds is not measured again, what failed is; a file of another machine is refused."""
    runs = importlib.import_module("common.runs")
    monkeypatch.setattr(runs, "fresh_memory", contextlib.nullcontext)
    options = argparse.Namespace(out=tmp_path / "found.json", budget=1e9, resume=True)
    asked: list[str] = []

    def cell(name: str) -> dict[str, Any]:
        asked.append(name)
        if name == "b" and asked.count("b") == 1:
            raise RuntimeError("cut")
        return {"us": len(asked)}

    def ran(names: str) -> Any:
        run = runs.Run(options)
        run.summary = lambda report: {"n": len(report["cells"])}
        run.each(cell, names)
        return run.report

    assert ran("ab")["failed"] == {"cells b": "RuntimeError: cut"}
    found = ran("abc")
    assert json.loads(options.out.read_text()) == found
    assert asked == ["a", "b", "b", "c"] and found["summary"] == {"n": 3} and not found["failed"]
    assert found["cells"] == {"a": {"us": 1}, "b": {"us": 3}, "c": {"us": 4}}
    options.budget = -1.0
    assert ran("ad")["skipped"] == ["cells d"] and asked[-1] == "c"
    options.out.write_text(json.dumps({**found, "environment": {"torch": "0.1"}}))
    with pytest.raises(SystemExit, match=r"torch 0\.1"):
        runs.Run(options)


@given(st.integers(1, 40), st.floats(0.5, 0.99))
def test_the_interval_of_a_median_is_as_sure_as_it_says(n: int, level: float) -> None:
    """Of n fair coins: the chance of fewer heads than its ends leave out, by exact counting."""
    low, high = measure().median_interval(reversed(range(n)), level)
    assert low + high == n - 1 and low <= high
    outside = 2 * sum(math.comb(n, k) for k in range(low + 1)) / 2**n
    narrower = 2 * sum(math.comb(n, k) for k in range(low + 2)) / 2**n
    assert outside <= 1 - level + 1e-12 or low == 0
    assert narrower > 1 - level or low + 1 > high - 1


@given(st.integers(1, 12))
def test_in_a_balanced_order_nobody_has_a_better_place(n: int) -> None:
    """Everyone stands at every place, and comes after every other, equally often."""
    orders = measure().balanced(n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    places = Counter((i, who) for order in orders for i, who in enumerate(order))
    after = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(places) == n * n and len(set(places.values())) == 1
    assert len(after) == n * (n - 1) and len(set(after.values())) <= 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Milliseconds of the clock of a device, which the host waits for."""
    ms = [0.0]

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = ms[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("time.perf_counter", lambda: ms[0] / 1e3)
    return ms


def taking(now: list[float], made: Counter[str], name: str, ms: float, heat: range) -> Any:
    """A call of so many milliseconds, nine times as many while the GPU heats."""

    def call() -> None:
        now[0] += 9 * ms if made[name] in heat else ms
        made[name] += 1

    return call


def test_in_turn_times_everyone_as_long_in_every_round_but_the_first(now: list[float]) -> None:
    made: Counter[str] = Counter()
    calls = {
        "one": taking(now, made, "one", 1.0, range(3, 3 + 9)),
        "two": taking(now, made, "two", 2.0, range(3, 3 + 5)),
        "slow": taking(now, made, "slow", 50.0, range(0)),
    }
    us = measure().in_turn(calls, rounds=3, span=0.004)
    assert us == {"one": [pytest.approx(1e3)] * 3, "two": [pytest.approx(2e3)] * 3,
                  "slow": [pytest.approx(5e4)] * 3}  # fmt: skip
    repeats = {"one": 4, "two": 2, "slow": 1}  # as many to warm up, after one while the others end
    assert made == {name: 3 + 4 * (1 + 2 * n) for name, n in repeats.items()}


def test_calls_of_a_mix_take_turns_and_are_timed_apart(now: list[float]) -> None:
    made: Counter[str] = Counter()
    a, b, other = (
        taking(now, made, name, ms, range(0)) for name, ms in (("a", 1.0), ("b", 3.0), ("c", 2.0))
    )
    us = measure().mixes_in_turn({"ours": {"a": a, "b": b}, "peer": {"a": other}}, 2, 0.02)
    assert us == {"a": {"ours": [pytest.approx(1e3)] * 2, "peer": [pytest.approx(2e3)] * 2},
                  "b": {"ours": [pytest.approx(3e3)] * 2}}  # fmt: skip
    assert made["b"] == 3 + 3 * 2 * 5 and made["a"] == made["b"] + 3


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 3))
def test_every_round_reads_everyone_once_and_the_first_ones_only_heat(
    n: int, rounds: int, heat: int
) -> None:
    read: list[str] = []
    timers = {name: lambda name=name: read.append(name) or len(read) for name in "abcde"[:n]}
    found = measure().in_rounds(timers, rounds, heat)
    every = [sorted(read[i : i + n]) for i in range(0, len(read), n)]
    assert every == [sorted(timers)] * (heat + rounds)
    first = measure().balanced(n)[0] if every else []
    assert read[:n] == [list(timers)[place] for place in first]
    for name, readings in found.items():
        assert [read[at - 1] for at in readings] == [name] * rounds
        assert all(at > heat * n for at in readings)


def test_a_slow_candidate_runs_two_rounds_and_is_compared_in_those(memory_bound: Any) -> None:
    clock = itertools.cycle([1.0, 1.5, 0.8])

    class Replay:
        def __init__(self, us: float) -> None:
            self.us = us

        def time(self) -> float:
            return self.us * next(clock)

    us = {"fuseops": 10.0, "again": 9.0, "eager": 200.0}
    times = memory_bound.timed({name: Replay(v) for name, v in us.items()}, 9)
    assert {name: len(found) for name, found in times.items()} == {
        "fuseops": 9, "again": 9, "eager": 2
    }  # fmt: skip
    for peer in ("eager", "again"):
        low, high = memory_bound.over_peer(times, peer)["interval"]
        assert (5 if peer == "eager" else 0.3) < low <= high


def test_a_peer_is_faster_by_the_capture_that_does_better(memory_bound: Any) -> None:
    """All of them on one clock, that changes from round to round."""
    clock = [0.5, 1.0, 2.0, 1.1, 0.7, 0.9, 1.3]
    times = {"again": [12.5 * c for c in clock], "fuseops": [13 * c for c in clock]}
    times["compile"] = [10 * c for c in clock]
    assert memory_bound.over_peer(times, "compile") == {"ratio": 0.8, "interval": [0.8, 0.8]}


def test_gemms_are_held_to_the_bar_of_their_kind_and_split(grouped_gemm: Any) -> None:
    def record(**ratios: float) -> dict[str, Any]:
        return {"ratios": {peer: {"ratio": ratio} for peer, ratio in ratios.items()}}

    settled = {
        "mixtral/fc1/fwd/uniform": record(torch=1.01, dense=0.96),
        "mixtral/fc2/dgrad/uniform": record(torch=0.99, dense=0.98),
        "mixtral/fc1/wgrad/uniform": record(torch=1.02, dense=0.5),
        "mixtral/fc1/wgrad_into/uniform": record(torch=1.29),
    }
    cells = {"mixtral/fc1/fwd/zipf": record(dense=0.96), "qwen3_8k/fc1/fwd/zipf": record(dense=0.5)}
    rate = {"n_1856/fwd": 500.0, "n_2048/fwd": 600.0}
    edges = {name: {"tflops": {"fuseops": tflops}} for name, tflops in rate.items()}
    few = {"1024x64": {"us": {}, **record(copy=0.84)}}
    checks = {"mixtral/fc1/fwd": None, "mixtral/fc2/wgrad": "two runs differ"}
    report = {"settled": settled, "cells": cells, "cool": {}, "edges": edges, "small_groups": few}
    report["checks"] = checks
    found = grouped_gemm.summary(report)
    below = {name: list(row["below"]) for name, row in found.items() if row["below"]}
    assert below == {
        "fwd/dense/settled": ["mixtral/fc1/fwd/uniform"],
        "dgrad/torch/settled": ["mixtral/fc2/dgrad/uniform"],
        "wgrad_into/torch/settled": ["mixtral/fc1/wgrad_into/uniform"],
        "products/torch/settled": ["mixtral/fc2/dgrad/uniform"],
        "products/dense/settled": ["mixtral/fc1/fwd/uniform"],
        "edges/next": ["n_1856/fwd"],
        "small/copy": ["1024x64"],
        "wrong, not timed": ["mixtral/fc2/wgrad"],
    }
    assert found["products/torch/settled"]["least"] == ["mixtral/fc2/dgrad/uniform", 0.99]


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20), st.floats(1.01, 1.5))
def test_a_paired_ratio_is_that_of_every_round(clock: list[float], faster: float) -> None:
    """Both slow down together from round to round: that is not in the ratio, nor in its interval."""
    found = measure().paired([10 * c for c in clock], [10 * c * faster for c in clock])
    assert found["interval"][0] <= found["ratio"] <= found["interval"][1]
    assert all(abs(r - faster) <= 1e-4 for r in (found["ratio"], *found["interval"]))


def test_no_figure_is_stale() -> None:
    made = tables()
    said = made.PAGE.read_text(encoding="utf-8")
    assert said == made.page(said), "stale: python benchmarks/tables.py"
    readme = made.README.read_text(encoding="utf-8")
    assert readme == made.readme(readme), "stale: python benchmarks/tables.py"


def test_no_picture_is_stale() -> None:
    drawn = loaded("pictures").pictures()
    assert {path.name for path in drawn} == {"speed.svg", "memory.svg", "plan.svg", "curves.svg"}
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is stale: python benchmarks/tables.py"
        )
    assert set(drawn) == set((BENCHMARKS.parent / "docs" / "pictures").glob("*.svg"))


def test_a_chart_is_as_long_as_its_figures() -> None:
    bars = [ChartBar(str(v), v, f"{v} GiB", "ours") for v in (4.0, 8.0, 2.0)]
    text = bar_chart("a title", "a note", {"a <group>": bars})
    widths = [float(w) for w in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', text)]
    assert [w / widths[1] for w in widths] == pytest.approx([0.5, 1.0, 0.25], abs=0.01)
    assert "a &lt;group&gt;" in text and text.count(" GiB</text>") == 3


SCRIPTS = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("common/[a-z]*.py")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_what_it_names_in_modules(path: Path) -> None:
    """Without a GPU nothing else shows that a name in the package has become another one."""
    script = path.relative_to(BENCHMARKS).with_suffix("")
    known = vars(importlib.import_module(".".join(script.parts)))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if isinstance(module, types.ModuleType):
                assert hasattr(module, node.attr), f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_every_result_is_under_a_subject_and_none_is_superseded() -> None:
    """Without a file of a table, the table is another one."""
    made = subjects()
    every = [table for subject in made.SUBJECTS.values() for table in subject.tables]
    listed = {name for table in every for name in table.files}
    assert listed == {path.stem for path in made.RESULTS.glob("*.json")}
    for table in every:
        for left_out in table.files if len(table.files) > 1 else ():
            rest = [name for name in table.files if name != left_out]
            assert table.rows() != table.rows(*rest), f"{left_out} is superseded by {rest}"


def test_what_two_files_have_is_taken_from_the_first() -> None:
    new = {"cells": {"a": {"us": 1, "ratio": 2}}}
    old = {"cells": {"a": {"us": 3, "mib": 4}, "b": {"us": 5}}, "more": 6}
    assert subjects().merged(new, old) == {
        "cells": {"a": {"us": 1, "ratio": 2, "mib": 4}, "b": {"us": 5}}, "more": 6
    }  # fmt: skip


def test_a_headline_has_the_least_and_the_most_of_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subjects()
    rows = {
        "a": {"over": {"ratio": 0.876, "interval": [0.8, 0.9]}, "ms": 3.0},
        "b": {"over": {"ratio": 1.5, "interval": [1.4, 1.6]}},
    }
    monkeypatch.setattr(made, "measured", lambda name: rows)
    table = made.Table("", lambda found: found, "file")
    headline = made.Subject("{over} of it, {b|over} and {ms}", (table,)).short()
    assert headline == "0.88 to 1.50 of it, 1.50 and 3.00"


def test_what_is_below_its_bar_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subjects()
    layer, found = made.SUBJECTS["A MoE layer"], made.measured("moe_layer_h200")
    assert "**Met.**" in layer.section()
    slow = json.loads(json.dumps(found))
    slow["summary"]["mixtral/fwd+bwd"]["fuseops"]["ratio"] = 0.875
    slow["summary"]["mixtral/saved"]["of_sonic"] = 1.5
    monkeypatch.setattr(made, "measured", lambda name: slow if name == "moe_layer_h200" else found)
    assert layer.short_of_bar() == {"mixtral/fwd+bwd": 0.875, "mixtral/saved": 1.5}
    assert "**Missed** by mixtral/fwd+bwd 0.875; mixtral/saved 1.5." in layer.section()


def test_the_figures_of_the_readme_are_those_of_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slower layer is said to be slower, wherever the marks stand; what is around them stays."""
    made, measured = tables(), subjects().measured
    slow = json.loads(json.dumps(measured("moe_layer_h200")))
    slow["summary"]["mixtral/fwd+bwd"]["fuseops"]["ratio"] = 0.875
    for module in (made, subjects()):
        monkeypatch.setattr(
            module, "measured", lambda name: slow if name == "moe_layer_h200" else measured(name)
        )
    around = "before\n<!-- headline: by a script -->\nold\n<!-- end -->\nbetween\n"
    text = made.readme(around + "<!-- figures: by a script -->\n<!-- end -->\nafter")
    head, rows = text.split("between")
    assert "old" not in text and text.startswith("before\n<!-- headline") and rows.endswith("after")
    assert "at 0.88 to 1." in head.replace("\n", " ") and "forward, 0.88 to 1." in rows


def test_the_newest_versions_are_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tables()
    rows = {
        "torch 2.9.1": {"versions": {"torch": "2.9.1+cpu", "triton": "3.10.0", "transformers": "5.24.0"}},
        "torch 2.30.0": {"versions": {"torch": "2.30.0", "triton": "3.9.0", "transformers": "5.3.0"}},
    }  # fmt: skip
    tried = tmp_path / "rows.json"
    tried.write_text(json.dumps(rows))
    monkeypatch.setattr(made, "TRIED", tried)
    newest = {name: new for name, _, new in made.versions()[1:]}
    assert {k: newest[k] for k in ("torch", "triton", "transformers")} == {
        "torch": "2.30", "triton": "3.10", "transformers": "5.24"
    }  # fmt: skip


def test_a_cell_that_failed_stands_in_the_table() -> None:
    cell = {"case": "relu", "rows": 4, "columns": 8, "wrong": "worst element 3"}
    assert subjects().of_copy({"bandwidth": [cell]}) == {"relu": {"4 x 8": "worst element 3"}}


def test_a_command_is_told_without_the_places_of_its_machine() -> None:
    said = "python fp8.py --out a.json --resume --what fwd+bwd --other /opt/of --budget 9 --span 1"
    told = "python benchmarks/fp8.py --what fwd+bwd --other FOLDER --span 1"
    assert subjects().command(said) == told


def test_the_planner_predicts_what_the_page_on_scale_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of it: what it saves, its times and what leaves."""
    scale = loaded("scale")
    committed = json.loads(scale.PLANNED.read_text(encoding="utf-8"))
    if committed["environment"]["torch"].split("-")[0] != torch.__version__.split("+")[0]:
        pytest.skip("written with another torch, which may save other tensors")
    name, ranks = "Qwen3-30B-A3B", 8
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        row = loaded("scale_planned").planned(scale.MODELS[name], ranks, "speed")
    finally:
        dist.destroy_process_group()
    want = committed["planned"][f"{name}, experts over {ranks}"]
    assert row.keys() == want.keys()
    for key, value in row.items():
        assert value == pytest.approx(want[key]), f"{key}: python benchmarks/scale_planned.py"


def test_the_page_on_scale_is_what_its_command_writes() -> None:
    scale = loaded("scale")
    assert scale.PAGE.read_text(encoding="utf-8") == scale.page(), "python benchmarks/scale.py"
    for name, billion in (("Qwen3-30B-A3B", 30.5), ("Qwen3-235B-A22B", 235.1)):  # as published
        assert abs(scale.MODELS[name].total / 1e9 - billion) < 0.1


def event(cat: str, begin: float, took: float, stream: int, call: int, **more: Any) -> Any:
    args = {"stream": stream, "correlation": call, **more}
    return {"cat": cat, "name": "Memcpy DtoH", "ts": begin, "dur": took, "args": args}


def test_a_trace_says_what_each_wait_of_the_stream_that_computes_was_for() -> None:
    kernels = [(0, 100), (103, 97), (260, 40), (400, 50), (600, 50)]
    launched = [0, 1, 2, 390, 3]  # the fourth when nothing had run for 70 us
    copies = [
        (95, 160, 7),
        (455, 100, 7),
        (300, 20, 1),
    ]  # nothing waits for the second; the last computes
    device = [event("kernel", b, took, 1, k) for k, (b, took) in enumerate(kernels)]
    device += [event("gpu_memcpy", b, took, s, 9, bytes=1 << 24) for b, took, s in copies]
    host = [event("cuda_runtime", at, 1, 0, k) for k, at in enumerate(launched)]
    found = importlib.import_module("common.offload_trace").Trace([*device, *host]).found(1)
    assert found["ms"] == 0.65 and found["out_gb_s"] == pytest.approx(2**25 / 260e3)
    assert (found["idle_ms"], found["host_late_ms"]) == (0.293, 0.07)
    assert found["behind_copies_ms"] == 0.06 and found["us_beside_out"] == 3
