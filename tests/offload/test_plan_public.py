"""offload.plan: what it says, what it draws, and that it runs as it was planned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from profiles_drawn import LINK, MB, profile_of, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fuseops as fo
from fuseops import offload
from fuseops.cli import main
from fuseops.errors import FuseOpsError
from fuseops.observe.memory import StorageMeter, tensors_in
from fuseops.offload import scheduler as scheduler_module
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.lanes.protocol import Event, Lane
from fuseops.offload.lanes.simulated import SimulatedLanes
from fuseops.offload.planning.hardware import Curve, Hardware
from fuseops.offload.planning.plan import OffloadPlan, plan_profile
from fuseops.offload.planning.planner import Limits
from fuseops.offload.planning.simulate import simulate
from fuseops.offload.planning.trace import trace
from fuseops.offload.schedule import LinkSettings
from fuseops.torch_private import storage_key

D = 64
# So slow a machine that copies fit into the step of a tiny model.
SLOW = Hardware("slow", *[Curve(((1 << 10, 50.0),))] * 3, memory=1e-3)


def block() -> nn.Module:
    return fo.Residual(
        fo.ops.RMSNorm(D), fo.ops.Linear(D, 4 * D), fo.ops.SwiGLU(), fo.ops.Linear(2 * D, D)
    )


def swiglu_mlp() -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.Linear(128, 256, bias=False),
            "act": fo.ops.SwiGLU(),
            "fc2": fo.ops.Linear(128, 128, bias=False),
        }
    )


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return x


def planned(**options: Any) -> OffloadPlan:
    options = {"hardware": SLOW, "min_bytes": 1 << 10, "layers": "blocks.*", **options}
    return offload.plan(Model(), torch.randn(256, D), **options)


@pytest.fixture(scope="module")
def tight() -> OffloadPlan:
    """Two thirds of the peak of a transformer on a link of 10 GB/s."""
    profile = transformer(12, 6)
    return plan_profile(profile, LINK, Limits(profile.peak * 2 // 3))


# --- what it says


def test_without_a_budget_what_is_free_leaves() -> None:
    plan = planned()
    assert plan.fits and not plan.warnings and plan.after.stall == 0
    assert plan.bytes_of("offload") == plan.after.moved > 0
    assert plan.after.peak <= plan.before.peak and plan.recomputed == ()
    why = {t.reason for t in plan.tensors if t.decision == "keep"}
    assert "not needed for the peak" not in why


def test_a_budget_is_kept() -> None:
    free = planned()
    plan = planned(peak=free.after.peak + 1000)
    assert plan.fits and plan.after.peak <= free.after.peak + 1000


def test_a_budget_that_cannot_be_kept_is_refused_in_words() -> None:
    plan = planned(peak="1KiB")
    assert not plan.fits
    assert "does not fit: the lowest predicted peak is" in plan.explain()


def test_a_peak_that_offloading_cannot_lower_is_told() -> None:
    """accelerate's lesson: bytes may leave, and the peak stay where it is."""
    profile = profile_of(4, 1, lambda layer, n: MB, lambda layer: 1e-3)
    ops = list(profile.ops)
    ops[-1] = ops[-1]._replace(resident=10 * profile.peak)  # the optimizer, say
    plan = plan_profile(replace(profile, ops=tuple(ops)), LINK, Limits(profile.peak))
    assert any("offloading cannot lower the peak" in warning for warning in plan.warnings)
    assert "backward of blocks.0" in plan.warnings[-1]


def test_every_saved_tensor_has_a_decision_and_a_reason(tight: OffloadPlan) -> None:
    assert len(tight.tensors) == len(tight.profile.saved)
    assert {t.decision for t in tight.tensors} >= {"keep", "offload"}
    assert all(t.reason for t in tight.tensors)
    for t in tight.tensors:
        assert (t.window is not None) == (t.decision == "offload")


def test_windows_are_where_the_lanes_were_busy(tight: OffloadPlan) -> None:
    busy = {(b.start, b.end) for b in tight.after.busy}
    for t in tight.tensors:
        if t.window is not None:
            assert {t.window.out, t.window.back} <= busy
            assert t.window.out[1] <= t.window.back[0]


def test_equal_layers_share_a_line(tight: OffloadPlan) -> None:
    text = tight.explain()
    assert len(text.splitlines()) < len(tight.explain(every=True).splitlines())
    assert "blocks.{" in text
    assert len(tight.explain(every=True).splitlines()) >= len(tight.tensors)


GOLDEN = """\
model     drawn, one step, recorded
hardware  ten (given)
budget    194.5 MiB; host without limit
peak      324.2 MiB in the forward of blocks.5, nothing moved
          190.7 MiB in the forward of blocks.3, by this plan
step      72.00 ms -> 72.00 ms (+0.00 %): stalls 0.00 ms, recomputation 0.00 ms
offload   133.5 MiB leave and are let go 2 layers later, 133.5 MiB of host memory
          152.6 MiB can leave without a stall: 10.0 GB/s out, 10.0 GB/s back

offload 133.5 MiB: the link has room       out ms      back ms  slack ms
  blocks.{0-3}.x0  114.4 MiB (4)    1.33-4.33  56.00-59.00      3.67
  blocks.{2-3}.x1   19.1 MiB (2)  12.33-13.33  40.00-41.00      2.67

keep 76.3 MiB: read again too soon
  blocks.{4-5}.x0   57.2 MiB (2)
  blocks.{4-5}.x1   19.1 MiB (2)

keep 19.1 MiB: not needed for the peak
  blocks.{0-1}.x1   19.1 MiB (2)
"""


def test_the_whole_text_of_a_plan() -> None:
    """Six layers of 4 ms that save 30 and 10 MB each; 10 GB/s carry 40 MB in that time."""
    profile = profile_of(6, 2, lambda layer, n: (30, 10)[n] * MB, lambda layer: 4e-3, groups=True)
    plan = plan_profile(profile, LINK, Limits(profile.peak * 6 // 10))
    assert plan.explain(wide=True) == GOLDEN.rstrip()
    narrow = GOLDEN.replace("  out ms      back ms  slack ms", "").splitlines()
    assert plan.explain().splitlines() == [
        line[:33].rstrip() if "blocks.{" in line else line.rstrip() for line in narrow
    ]


def test_json_is_plain_and_complete(tight: OffloadPlan) -> None:
    data = json.loads(json.dumps(tight.to_json()))
    assert data["schema_version"] == 1 and data["fits"] is tight.fits
    assert data["after"]["peak_bytes"] == tight.after.peak
    assert [t["name"] for t in data["tensors"]] == [t.name for t in tight.tensors]
    assert Hardware.from_json(data["hardware"]) == tight.hardware


@pytest.mark.parametrize(
    "wrong",
    [
        *({"peak": "much"}, {"host": -1}, {"layers": "nothing.*"}, {"hardware": "h200"}),
        *({"loss": 3}, {"min_bytes": "1MiB"}, {"split": "3"}, {"split": 3}),
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FuseOpsError):
        planned(**wrong)
    with pytest.raises(FuseOpsError, match=r"nn.Module"):
        offload.plan(3)  # type: ignore[arg-type]


# --- what it draws


def test_the_trace_is_one_that_viewers_read(tight: OffloadPlan, tmp_path: Path) -> None:
    tight.save_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert events == json.loads(json.dumps(trace(tight)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {1, 2, 3, 4} and all(e["dur"] >= 0 for e in slices)
    counter = [e["args"]["bytes"] for e in events if e["ph"] == "C" and "planned" in e["name"]]
    assert max(counter) == tight.after.peak
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {"layers", "compute", "D2H", "H2D"}
    out = sum(e["args"]["bytes"] for e in slices if e["tid"] == 3)
    assert 0 <= out - tight.after.moved <= 512 * len(tight.tensors)  # places are aligned


class Checker(HTMLParser):
    """Every element that is opened is closed, and nothing is fetched."""

    VOID = {"meta", "line", "rect", "circle", "path", "br", "wbr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe"}
        places = [value for name, value in attrs if name in ("src", "href")]
        assert all(value and value.startswith("#") for value in places)  # within the page
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone(tight: OffloadPlan, tmp_path: Path) -> None:
    tight.save_html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    checker = Checker()
    checker.feed(page.replace("<circle", "<rect").replace("</circle>", "</rect>"))
    assert checker.open == [] and "http" not in page
    assert "Offload plan of drawn" in checker.text and "blocks.{" in checker.text
    assert page.count('class="d2h"') == sum(b.lane == "d2h" for b in tight.after.busy)
    assert tight._repr_html_().startswith('<div class="fuseops">')


def test_names_in_the_page_are_escaped() -> None:
    profile = profile_of(4, 1, lambda layer, n: MB, lambda layer: 1e-3)
    assert "<b>&" not in plan_profile(replace(profile, model="<b>&"), LINK).to_html()


# --- that it runs as planned


def train(model: nn.Module, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(x).sum().backward()


@pytest.mark.parametrize("record", [False, True])
def test_the_decisions_run_as_they_are(record: bool) -> None:
    model, x = Model(), torch.randn(256, D)
    options = {"hardware": SLOW, "layers": "blocks.*", "min_bytes": 1 << 10, "record": record}
    plan = offload.plan(model, x, **options)
    assert plan.bytes_of("offload")
    with offload.Scheduler(model, layers=plan.layers, plan=plan) as scheduler:
        train(model, x, 3)
    scheduler.assert_matched(plan)
    moved = {e.name for e in scheduler.report().entries if e.decision == "moved"}
    assert moved >= {t.name for t in plan.tensors if t.decision == "offload"}


def test_a_plan_chooses_its_lag_and_the_scheduler_follows_it() -> None:
    """A copy takes 7.5 ms, and begins when 6.7 ms of two layers are left."""
    profile = profile_of(12, 1, lambda layer, n: 75 * MB, lambda layer: 4e-3)
    plans = {lag: plan_profile(profile, LINK, settings=LinkSettings(lag=lag)) for lag in (2, 3, 4)}
    chosen = plan_profile(profile, LINK)
    assert plans[2].bytes_of("offload") < max(p.bytes_of("offload") for p in plans.values())
    assert chosen.bytes_of("offload") == max(p.bytes_of("offload") for p in plans.values())
    assert chosen.settings.lag > 2 and chosen.after.stall == 0
    assert offload.Scheduler(Model(), "blocks.*", plan=chosen).lag == chosen.settings.lag
    assert offload.Scheduler(Model(), "blocks.*", plan=chosen, lag=1).lag == 1
    assert offload.Scheduler(Model(), "blocks.*").lag == 2


def test_a_slower_link_than_planned_stalls_by_what_it_is_slower_and_no_more() -> None:
    plan = plan_profile(transformer(12, 6), LINK)
    leave = [k for k, t in enumerate(plan.tensors) if t.decision == "offload"]
    late = simulate(plan.profile, leave, LINK.slower(1.015), plan.settings)
    copying = sum(b.end - b.start for b in plan.after.busy if b.lane == "d2h")
    assert leave and plan.after.stall == 0
    assert late.stall <= 0.015 * copying


def test_one_scheduler_follows_plans_in_turn() -> None:
    """With one arena, and the decisions and the lag of whichever it is attached with."""
    free = planned()
    names = [t.name for t in free.tensors if t.decision == "offload"]
    few = dict.fromkeys(names[::2], "offload")
    model, x = Model(), torch.randn(256, D)
    scheduler = offload.Scheduler(model, "blocks.*", plan=free)
    reserved = []
    for plan in (free, few, free, few):
        scheduler.plan = plan
        with scheduler:
            for _ in range(2):
                model(x).sum().backward()
        scheduler.assert_matched()
        assert scheduler._scope.mover.schedule.lag == (free.settings.lag if plan is free else 2)
        reserved.append(dict(scheduler.report().schedule)["host_reserved"])
    assert len(set(reserved)) == 1


def test_a_different_plan_is_not_matched() -> None:
    model, x = Model(), torch.randn(256, D)
    plan = offload.plan(model, x, hardware=SLOW, min_bytes=1 << 10, layers="blocks.*")
    keeps = dict.fromkeys(plan.decisions, "keep")
    with offload.Scheduler(model, layers=plan.layers, plan=keeps) as scheduler:
        train(model, x, 2)
    with pytest.raises(FuseOpsError, match="not what was planned"):
        scheduler.assert_matched(plan)


class Logged:
    """Lanes that note copies and waits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[tuple[Any, ...]] = []

    def move(self, lane: Lane, sources: Any, target: Any, offsets: Any) -> Any:
        if lane in ("d2h", "h2d"):
            names = [b.name for b in (*sources, target)]
            self.log.append(("copy", lane, target.nbytes, *names))
        return super().move(lane, sources, target, offsets)  # type: ignore[misc]

    def wait(self, lane: Lane, event: Event) -> None:
        self.log.append(("wait", lane, event.lane))
        super().wait(lane, event)  # type: ignore[misc]


class LoggedCpu(Logged, LazyLanes):
    pass


class LoggedSimulation(Logged, SimulatedLanes):
    pass


def test_what_was_simulated_is_what_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One schedule, two kinds of lanes: the same copies and waits, in the same order."""
    model, x = Model(), torch.randn(256, D)
    plan = offload.plan(model, x, hardware=SLOW, min_bytes=1 << 10, layers="blocks.*")
    simulated = LoggedSimulation(SLOW.lane_seconds)
    chosen = [k for k, t in enumerate(plan.tensors) if t.decision == "offload"]
    simulate(plan.profile, chosen, SLOW, plan.settings, lanes=simulated)
    # Lazily: a copy that ran at once leaves nothing to wait for.
    executed = LoggedCpu(lambda queued: 0)
    monkeypatch.setattr(scheduler_module, "make_lanes", lambda device, host: executed)
    with offload.Scheduler(model, layers=plan.layers, plan=plan):
        train(model, x, 2)
    assert len(simulated.log) > 10
    assert executed.log[: len(simulated.log)] == simulated.log


class Unseen(CpuLanes):
    """Lanes whose host memory is not counted as the device's: no mode sees it made."""

    def make(self, nbytes: int) -> Tensor:
        with _disable_current_modes():
            return super().make(nbytes)


class Watch(TorchDispatchMode):
    """Bytes that live after every op, the schedule's own included."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.meter, self.levels = StorageMeter(there), list[tuple[int, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {storage_key(t.untyped_storage()) for t in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tensors_in(out) if storage_key(t.untyped_storage()) not in known]
        self.levels.append((self.meter.after(made), str(func)))
        return out


@pytest.mark.uninitialized
@pytest.mark.parametrize("share, small", [(None, 0), (None, 4 << 20), (0.8, 0), (0.5, 4 << 20)])
def test_predicted_bytes_are_those_that_live(
    share: float | None, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak to the byte, the op in which it stands, and the host's bytes."""
    model, x = Model(4), torch.randn(256, D)
    free = offload.plan(model, x, hardware=SLOW, min_bytes=1 << 10, layers="blocks.*")
    peak = None if share is None else int(free.before.peak * share)
    settings = LinkSettings(small=small)
    plan = plan_profile(free.profile, SLOW, Limits(peak), settings, layers=free.layers)
    monkeypatch.setattr(scheduler_module, "make_lanes", lambda device, host: Unseen())

    def step() -> None:
        y = model(x)
        y.backward(torch.ones_like(y))

    with offload.Scheduler(model, layers=plan.layers, plan=plan) as scheduler:
        scheduler._scope.mover.schedule.small = small
        for _ in range(2):
            step()
            model.zero_grad()
        with Watch([*model.parameters(), x]) as watch:
            step()
    level, op = max(watch.levels)
    assert (level, op) == (plan.after.peak, plan.profile.ops[plan.after.peak_position].name)
    assert dict(scheduler.report().schedule)["host_peak"] == plan.after.host
    assert level < plan.before.peak


# --- the command line


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 0
    return capsys.readouterr().out


TARGET = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    return model, (torch.randn(8192, 64),), {}
"""


def test_the_command_plans_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET)
    page, timeline = tmp_path / "p.html", tmp_path / "t.json"
    files = ("--html", str(page), "--trace", str(timeline))
    text = output(capsys, "offload-plan", str(file), *files)
    assert "TanhBackward0" in text and "peak" in text and str(page) in text
    assert page.exists() and json.loads(timeline.read_text())["traceEvents"]
    data = json.loads(output(capsys, "offload-plan", str(file), "--json"))
    assert data["schema_version"] == 1 and data["command"] == "offload-plan"
    assert data["profile"] == "dry run" and data["layers"] == ["0", "1", "2", "3", "4", "5"]


def test_the_command_reads_a_machine_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, machine = tmp_path / "target.py", tmp_path / "machine.json"
    file.write_text(TARGET)
    machine.write_text(json.dumps(SLOW.to_json()))
    data = json.loads(
        output(capsys, "offload-plan", str(file), "--json", "--hardware", str(machine))
    )
    assert data["hardware"]["name"] == "slow"


def test_a_plan_that_does_not_fit_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET)
    assert main(["offload-plan", str(file), "--peak", "1KiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_the_command_plans_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET)
    options = ("offload-plan", str(file), "--ranks", "2", "--micro-batches", "4")
    assert len(output(capsys, *options).splitlines()) == 3
    data = json.loads(output(capsys, *options, "--chunks", "3", "--json"))
    assert data["pipeline"].items() >= {"ranks": 2, "micro_batches": 4, "chunks": 3}.items()
    peaks = [rank["before"]["peak_bytes"] for rank in data["ranks"]]
    assert len(peaks) == 2 and peaks[0] > peaks[1]
    assert [rank["html"] for rank in data["ranks"]] == [None, None]
    options = (*options, "--html", str(tmp_path / "p.html"))
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    options = (*options, "--trace", str(trace))
    text = output(capsys, *options)
    traces = [tmp_path / "t.rank0.json", tmp_path / "t.rank1.json"]
    assert all(file.exists() and text.count(str(file)) == 1 for file in (page, *traces))
    checker = Checker()
    checker.feed(page.read_text().replace("<circle", "<rect").replace("</circle>", "</rect>"))
    assert checker.open == [] and "http" not in page.read_text()
    assert checker.text.count("% less") == 2 and "Rank 1" in checker.text
    assert all(f'href="#rank{k}"' in page.read_text() for k in range(2))
    data = json.loads(output(capsys, *options, "--json"))
    assert [(rank["html"], rank["trace"]) for rank in data["ranks"]] == [
        (str(page), str(file)) for file in traces
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--peak", "ten"), "--peak: expected bytes such as 11GiB.*'ten'"),
        (("--ranks", "0"), "--ranks: expected a whole number, 1 or more, got '0'"),
        (("--micro-batches", "4"), "--micro-batches and --chunks are of a pipeline.*--ranks"),
        (("--chunks", "2"), "--micro-batches and --chunks are of a pipeline.*--ranks"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert main(["offload-plan", *options]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_model_that_is_one_layer_is_called_the_model() -> None:
    model = fo.Sequential(fo.ops.Linear(D, D), fo.ops.SiLU())
    plan = offload.plan(model, torch.randn(256, D), hardware=SLOW)
    assert "in the backward of the model" in plan.explain()
    assert "nothing leaves" in plan.explain()


def test_without_a_target_it_plans_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "offload-plan")
    assert "blocks.{" in text and "NVIDIA H200" in text and "offload" in text


@pytest.mark.parametrize("peak", [(), ("--peak", "7GiB")])
def test_the_text_of_the_example_fits_its_columns(
    peak: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, made = offload.plan, list[Any]()

    def planned_once(*args: Any, **options: Any) -> Any:
        if not made:
            made.append(plan(*args, **options))
        return made[0]

    monkeypatch.setattr(offload, "plan", planned_once)
    for columns, wide in ((80, ()), (100, ()), (120, ("--wide",))):
        monkeypatch.setenv("COLUMNS", str(columns))
        main(["offload-plan", *wide, *peak])
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= columns
        assert ("out ms" in text) == bool(wide)


@pytest.mark.parametrize("record", [False, True])
def test_components_of_quantized_tensors_are_planned_each_by_its_name(record: bool) -> None:
    model = nn.Sequential(*(swiglu_mlp() for _ in range(4)))
    fo.configure(model, recipe=fo.recipes.Float8BlockScaling(hidden="float8"))
    x = torch.randn(1024, 128, requires_grad=True)
    codes = offload.Policy("**.act.x.row", min_bytes=1)
    plan = offload.plan(model, x, layers="*", policy=codes, record=record, hardware=SLOW)
    of = {t.name: t for t in plan.tensors if t.name.startswith("0.act.")}
    row, scale = of["0.act.x.row"], of["0.act.x.row_scale"]
    assert (row.dtype, row.shape, row.nbytes) == ("float8_e4m3fn", (1024, 256), 1024 * 256)
    assert (scale.dtype, scale.nbytes) == ("float32", 4 * 1024 * 256 // 128)
    assert row.decision == "offload" and scale.decision == "keep", plan
    assert "act.x.row" in plan.explain() and "0.act.x.row_scale" in plan.explain(every=True)

    def grads() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])

    expected = grads()
    with offload.Scheduler(model, layers="*", plan=plan, lag=0) as scheduler:
        assert all(map(torch.equal, grads(), expected))
    scheduler.assert_matched()
    moved = {e.name: e.nbytes for e in scheduler.report().entries if e.decision == "moved"}
    assert moved["0.act.x.row"] == row.nbytes and not [n for n in moved if n.endswith("scale")]


def test_a_tight_budget_asks_what_preferring_memory_gives() -> None:
    """The rows of dy are not copied then: the step peaks as the plan of a model that prefers memory says."""
    model = nn.Sequential(fo.MoE(1024, 768, 4, 4, dtype=torch.bfloat16))
    x = torch.randn(2048, 1024, dtype=torch.bfloat16, requires_grad=True)
    ask = {"layers": "0", "hardware": Hardware.h200(), "min_bytes": 1024}
    roomy = offload.plan(model, x, **ask, peak="1GiB")
    peak = roomy.before.peak
    tight = offload.plan(model, x, **ask, peak=peak - 1)
    assert not roomy.lean and 0 < tight.lean < peak
    assert "prefer='memory'" in str(tight) and "prefer='memory'" not in str(roomy)
    fo.configure(model, prefer="memory")
    lean = offload.plan(model, x, **ask, peak=tight.lean - 1)
    assert lean.before.peak == tight.lean and not lean.lean
