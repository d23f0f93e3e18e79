"""The command line: exit codes, JSON with a schema_version, and errors that say what was expected."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

import fuseops as fo
from fuseops import kernels
from fuseops.cli import bench, demo, main, terminal
from fuseops.cli.terminal import progress
from fuseops.cli.tune import distinct
from fuseops.kernels import aot, configs
from fuseops.offload.planning.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = str(ROOT / "examples" / "quickstart.py")

MODEL = """
import torch
import fuseops as fo

def build():
    return fo.Sequential(fo.ops.Linear(4, 4), fo.ops.GELU()), (torch.randn(3, 4),), {}
"""


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(output(capsys, *argv, "--json"))
    assert data["schema_version"] == 1 and data["command"] == argv[0]
    return data


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, "a_model", raising=False)  # that of an earlier test
    file = tmp_path / "a_model.py"
    file.write_text(MODEL)
    return str(file)


def test_explain_prints_the_plan_and_the_misses_of_the_quickstart() -> None:
    run = fresh.run("-m", "fuseops", "explain", QUICKSTART, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "GroupedMLP  rule grouped_mlp (joint)" in run.stdout
    assert "DenseMLP  rule norm_mlp (joint)" in run.stdout
    assert "experts.fc1.x" in run.stdout


def test_a_reader_that_closes_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fuseops", "env"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 0


def test_explain_as_json(capsys: pytest.CaptureFixture[str], model_file: str) -> None:
    data = as_json(capsys, "explain", model_file)
    (plan,) = data["plans"]
    assert [span["rule"] for span in plan["forward"]] == ["linear_act"]
    assert data["saved_bytes"] == plan["saved_bytes"] == 2 * 3 * 4 * 4


def test_explain_writes_html(
    capsys: pytest.CaptureFixture[str], model_file: str, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    assert str(page) in output(capsys, "explain", model_file, "--html", str(page))
    assert "<svg" in page.read_text() and "linear_act" in page.read_text()
    error = output(
        capsys, "explain", model_file, "--html", str(tmp_path / "no" / "dir.html"), code=2
    )
    assert "cannot write" in error


def test_explain_takes_a_module(
    capsys: pytest.CaptureFixture[str], model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model_file).parent)
    assert "linear_act" in output(capsys, "explain", "a_model")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1", "defines no build()"),
        ("def build():\n    return 3", "returned int"),
        ("def build():\n    return 1, 2, 3", "returned (int, int, int)"),
        ("import torch\ndef build():\n    return torch.nn.Tanh(), (), 3", "int as side"),
    ],
)
def test_a_target_without_a_usable_build_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, words: str
) -> None:
    file = tmp_path / "bad_model.py"
    file.write_text(source)
    error = output(capsys, "explain", str(file), code=2)
    assert words in error and "Expected build() -> (model, args, side)" in error


@pytest.mark.parametrize(
    ("target", "words"),
    [("no/such/file.py", "no file no/such/file.py"), ("no_such_module", "no module")],
)
def test_a_target_that_is_not_there_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], target: str, words: str
) -> None:
    assert words in output(capsys, "explain", target, code=2)


def test_a_build_that_wants_arguments_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wants.py"
    file.write_text("def build(width):\n    raise AssertionError")
    assert "called without arguments: missing" in output(capsys, "explain", str(file), code=2)


def test_a_hardware_file_that_is_not_there_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], model_file: str
) -> None:
    command = ("offload-plan", model_file, "--hardware", "no/such.json")
    assert "hardware profile from no/such.json" in output(capsys, *command, code=2)


def test_a_model_without_a_sequential_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plain_torch.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Tanh(), (torch.ones(2),), {}")
    assert "no fuseops.Sequential ran" in output(capsys, "explain", str(file))


MISTAKES = {
    "syntax": ("def build(:\n", "SyntaxError: invalid syntax"),
    "import": ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
    "at import": ("LAYERS = 4 / 0\n", "LAYERS = 4 / 0"),
    "in build": (MODEL.replace("return ", "return one() and "), "name 'one' is not defined"),
    "of fuseops": (MODEL.replace("fo.ops.GELU()", "3"), "child '1' is of type int"),
    "in the forward": (
        "import torch\nclass Mine(torch.nn.Module):\n    def forward(self, x):\n        return x.nothing\n"
        "def build():\n    return Mine(), (torch.ones(2),), {}\n",
        "return x.nothing",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_users_file_shows_the_users_frames_only(
    capsys: pytest.CaptureFixture[str], model_file: str, mistake: str
) -> None:
    source, told = MISTAKES[mistake]
    Path(model_file).write_text(source)
    error = output(capsys, "explain", model_file, code=1)
    assert told in error
    frames = [line.split('"')[1] for line in error.splitlines() if line.startswith('  File "')]
    assert frames and set(frames) == {model_file}


@pytest.mark.parametrize("command", ["explain", "bench", "offload-plan", "offload-plan --record"])
@pytest.mark.parametrize("outer", ["torch.nn.", "fo."])
def test_inputs_that_do_not_fit_a_module_of_torch_are_said_to_be_the_models(
    capsys: pytest.CaptureFixture[str], model_file: str, command: str, outer: str
) -> None:
    Path(model_file).write_text(
        "import torch\nimport fuseops as fo\ndef build():\n"
        f"    return {outer}Sequential(torch.nn.Linear(3, 4)), (torch.ones(2, 5),), {{}}\n"
    )
    error = output(capsys, *command.split(), model_file, code=1)
    assert f"the model of {model_file} failed on the inputs of its build():" in error
    assert re.search(r"RuntimeError: (mat1 and mat2|a and b must have)", error)
    assert "File" not in error


def test_an_unknown_kernel_is_answered_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    error = output(capsys, "kernels", "--kernel", "rmsnorm_oprand", code=2)
    assert "'rmsnorm_oprand'. The closest are rmsnorm_operand" in error and len(error) < 300
    assert len(output(capsys, "kernels", "--kernel", "zzz", code=2)) < 150


def test_an_error_of_fuseops_shows_all_frames(
    model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("mine")

    wrong.__code__ = wrong.__code__.replace(co_filename=fo.cli.explain.__file__)
    monkeypatch.setattr("fuseops.cli.explain.plans", wrong)
    with pytest.raises(KeyError, match="mine"):
        main(["explain", model_file])


def test_an_error_of_the_model_is_a_failure(
    capsys: pytest.CaptureFixture[str], model_file: str
) -> None:
    Path(model_file).write_text(MODEL.replace("randn(3, 4)", "randn(3, 5)"))
    error = output(capsys, "explain", model_file, code=1)
    assert "ShapeError: Linear expects x with 4 features" in error


@pytest.mark.parametrize("argv", [[], ["explain"], ["nonsense"], ["env", "--nonsense"]])
def test_wrong_calls_exit_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["env", "kernels", "offload-plan", "demo"])
def test_an_unknown_option_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    error = output(capsys, command, "--nonsense", code=2)
    assert error.startswith(f"usage: fuseops {command} ")
    assert f"fuseops {command}: error: unrecognized arguments: --nonsense" in error


OF_ANOTHER_WAY = [
    *(("kernels", *way, *option) for way, options in (
        ([], (["--sample", "3"], ["--jobs", "2"], ["--all"])),
        (["--check"], (["--all"], ["--arch", "90"], ["--kernel", "norm"], ["--variants"])),
        (["--rebuild"], (["--sample", "3"], ["--arch", "90"], ["--kernel", "norm"], ["--variants"])),
    ) for option in options),
    *(("offload-plan", *options) for options in (
        ["--chunks", "2"], ["--micro-batches", "2"], ["--ranks", "2", "--every"], ["--ranks", "2", "--wide"]
    )),
]  # fmt: skip


@pytest.mark.parametrize("argv", OF_ANOTHER_WAY, ids=" ".join)
def test_an_option_that_would_do_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    assert "leave it out" in (error := output(capsys, *argv, code=2)) or "--ranks" in error


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert fo.__version__ in output(capsys, "--version")
    help_text = output(capsys, "--help")
    assert all(command in help_text for command in ("explain", "bench", "env", "demo"))


def test_env_says_what_is_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEOPS_DISABLE", "linear_act")
    data = as_json(capsys, "env")
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"]["fuseops"] == fo.__version__
    assert data["environment"]["FUSEOPS_DISABLE"] == "linear_act"
    assert data["environment"]["FUSEOPS_LOG"] == "not set"
    assert data["backends"]["reference"].startswith("yes")
    assert data["backends"]["triton on CUDA"].startswith("yes") == torch.cuda.is_available()
    assert data["settings"]["fusion"] is True
    assert torch.__version__ in output(capsys, "env")


def test_env_is_what_a_report_of_a_fault_begins_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = output(capsys, "env")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert urls["Issues"] in text.splitlines()[0]
    data = as_json(capsys, "env")
    assert {"numpy", "transformers", "peft", "triton"} <= data["versions"].keys()
    assert "from a checkout, " in data["versions"]["installed"]
    assert set(data["cuda"]) == {"torch built for", "driver"}
    monkeypatch.setenv("FUSEOPS_CACHE_DIR", str(Path.home() / "mine"))
    assert as_json(capsys, "env")["tuned"]["file"].startswith("~/mine/configs-")  # nobody's name
    assert str(Path.home()) not in output(capsys, "env")


def test_env_measures_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    measured = as_json(capsys, "env", "--measure")["measured"]
    if torch.cuda.is_available():
        assert Hardware.from_json(measured).d2h.peak > 0
    else:
        assert "torch sees no CUDA device" in measured["not measured"]


def test_bench_times_every_way(capsys: pytest.CaptureFixture[str], model_file: str) -> None:
    few = ("--rounds", "3", "--calls", "2")
    data = as_json(capsys, "bench", model_file, *few)
    assert set(data["microseconds"]) == {"fused", "unfused", "reference"}
    for times in data["microseconds"].values():
        assert 0 < times["low"] <= times["median"] <= times["high"]
    threads = torch.get_num_threads()
    text = output(capsys, "bench", *few)
    assert "nn.Sequential" in text and "eight Linear" in text
    assert torch.get_num_threads() == threads
    assert "1 or more" in output(capsys, "bench", "--rounds", "0", code=2)


def test_bench_draws_what_it_measured(
    capsys: pytest.CaptureFixture[str], model_file: str, tmp_path: Path
) -> None:
    few, plot = ("--rounds", "3", "--calls", "1"), tmp_path / "bench.svg"
    data = as_json(capsys, "bench", model_file, *few, "--plot", str(plot))
    drawn = plot.read_text()
    assert data["plot"] == str(plot) and "http" not in drawn.replace("http://www.w3.org", "")
    for way, times in data["microseconds"].items():
        assert way in drawn and f">{times['median']:.0f}<" in drawn
    assert drawn.count('class="range"') == len(data["microseconds"])
    wrong = str(tmp_path / "no" / "bench.svg")
    assert "cannot write" in output(capsys, "bench", model_file, *few, "--plot", wrong, code=2)


def test_bench_and_recorded_plans_tell_how_far_they_are(
    model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, int, int]] = []
    steps = dict.fromkeys(("fused", "unfused"), lambda: None)
    bench.measure(steps, 3, 1, lambda: None, lambda *told: heard.append(told))
    assert heard == [
        (f"round {k + 1}, {way}", k, 3) for k in range(3) for way in ("fused", "unfused")
    ]
    heard.clear()
    model, x = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.GELU()), torch.randn(3, 4)
    fo.offload.plan(model, x, record=True, progress=lambda *told: heard.append(told))
    assert [done for _, done, _ in heard] == [0, 1, 2, 3, 4] and {n for *_, n in heard} == {5}


def test_progress_is_seen_where_somebody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("timing", quiet=False) as told:
        told("one", 1, 2)
    assert capsys.readouterr() == ("", "timing\n")  # a line where nobody does
    for quiet, lines in ((True, True), (False, False)):
        with progress("timing", quiet, lines) as told:
            told("one", 1, 2)
        assert capsys.readouterr() == ("", "")
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("timing", quiet=False) as told:
        told("one", 1, 2)
    out, err = capsys.readouterr()
    assert out == "" and "timing one" in err and "50%" in err


def test_bench_runs_each_way_as_it_says(model_file: str) -> None:
    from fuseops.cli.bench import ways
    from fuseops.cli.target import load
    from fuseops.ops import scopes

    seen: list[list[str]] = []
    with scopes.watch_plans(lambda plan: seen.append([s.rule or s.note for s in plan.forward])):
        for step in ways(load(model_file)).values():
            step()
    assert seen == [["linear_act"], ["", ""], ["reference", "reference"]]


def test_demo_gets_its_arguments_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int)

    monkeypatch.setattr(demo, "add_arguments", add_arguments)
    monkeypatch.setattr(demo, "run", lambda args: 1 if args.steps == 3 else 0)
    assert main(["demo", "--steps", "3"]) == 1
    assert main(["demo", "--steps", "4"]) == 0


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a script of sh stand in for the Python that commands start."""

    def stand_in(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return stand_in


def test_demo_over_ranks_ends_without_a_word_when_its_output_is_closed(
    python: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python(
        "trap 'echo a traceback >&2; exit 1' TERM; for k in 1 2 3 4 5 6; do echo; sleep 0.2; done; exit 1"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["demo", "--ranks", "2"]) == 0
    assert capfd.readouterr().err == ""


def test_demo_over_ranks_runs_pretrain_with_options_that_it_takes(
    python: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    python("echo $@; echo a warning >&2; exit 3")
    assert main(["demo", "--ranks", "2", "--steps", "40"]) == 3
    printed = capsys.readouterr()
    assert printed.err == "a warning\n"
    command = printed.out.split()
    spec: Any = importlib.util.spec_from_file_location("pretrain", demo.PRETRAIN)
    spec.loader.exec_module(pretrain := importlib.util.module_from_spec(spec))
    c = pretrain.parsed(command[command.index(str(demo.PRETRAIN)) + 1 :])
    assert (c.steps, c.show) == (40, 4)
    with pytest.raises(SystemExit):
        pretrain.parsed(["--help"])
    shown = capsys.readouterr().out
    assert "examples/pretrain.py --stock  " in shown  # on a line, to be copied
    told = re.findall(r"^  --([\w-]+)(?: \S+)?(?:  +|\n {20,})\S", shown, re.MULTILINE)
    assert sorted(told) == sorted(name.replace("_", "-") for name in vars(c) if name != "stages")
    assert main(["demo", "--ranks", "2", "--json"]) == 2
    assert "leave out --ranks" in capsys.readouterr().err
    for given in ("--dim 30", "--layers 3 --pp 2", "--batch 3 --pp 2 --micro-batches 2"):
        with pytest.raises(SystemExit):
            pretrain.parsed(given.split())
        assert f"{' '.join(given.split()[:2])} is no multiple of" in capsys.readouterr().err
    for given, said in (("--chunks 2", "go through a pipeline"), ("--pp 0", "--pp is 0")):
        with pytest.raises(SystemExit):
            pretrain.parsed(given.split())
        assert said in capsys.readouterr().err


def test_only_demo_imports_the_demo() -> None:
    probe = (
        "import sys; from fuseops.cli import main; main(['env', '--json']); "
        "sys.exit('fuseops.demo.job' in sys.modules)"
    )
    run = fresh.run("-c", probe, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_a_table_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal.print_table([["way", "median"], ["[fused] and more", "1.5"], ["plain", "10.5"]])
    assert capsys.readouterr().out.splitlines() == [
        "way               median",
        "[fused] and more     1.5",
        "plain               10.5",
    ]


def test_kernels_prints_what_each_takes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "kernels", "--arch", "90", "--kernel", "norm_")["kernels"]
    assert {r["kernel"] for r in rows} >= {"norm_fwd_kernel", "norm_bwd_kernel"}
    assert all("norm_" in r["kernel"] for r in rows)
    assert all(r["arch"] == 90 and r["regs"] > 0 and r["shared"] >= 0 for r in rows)
    here = configs.triton_release()  # the pinned one's rows show what its own table lacks
    mine = {key.partition(" ")[0] for key in aot.read_table(here)}
    for row in rows:
        assert row["triton"] == aot.table_version(here if row["kernel"] in mine else aot.PINNED)
    shown = output(capsys, "kernels", "--arch", "80")
    worst = max(
        r["regs"] for r in as_json(capsys, "kernels", "--arch", "80")["kernels"] if "regs" in r
    )
    assert str(worst) in shown and "reference (needs sm_89)" in shown
    assert max(map(len, shown.splitlines())) <= 120
    header, *lines = output(capsys, "kernels", "--kernel", "norm_", "--variants").splitlines()
    assert header.split()[-1] == "variant" and all(
        "BLOCK_" in line or "reference" in line for line in lines
    )
    assert "give one of them" in output(capsys, "kernels", "--check", "--rebuild", code=2)
    assert "lists all" in output(capsys, "kernels", "--kernel", "nosuch", code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_tune_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str], model_file: str) -> None:
    assert "torch sees no CUDA device" in output(capsys, "tune", model_file, code=2)


def test_tune_times_a_repeated_call_once() -> None:
    x, y = torch.ones(2, 3), torch.ones(4, 3)
    op = kernels.bias_bwd
    calls = [(op, (x,), {}), (op, (x + 1,), {}), (op, (y,), {}), (kernels.bias_fwd, (x, x[0]), {})]
    assert distinct(calls) == [calls[1], *calls[2:]]
