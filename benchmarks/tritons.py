"""The same steps with two releases of Triton, in turn.

    python benchmarks/tritons.py --other /path/of/another/triton --out benchmarks/results/tritons_h200.json

A process cannot hold two Tritons, so each has a worker of its own on the same GPU, told span by span when to run: no
two run at once, and none waits long enough to cool the GPU. The steps are whole MoE layers (`moe_layer.py`), the GEMMs
of their experts (`grouped_problems.py`) and kernels bound by memory. Ratios are the other Triton's time over that of
the installed one, round by round, with the interval of their median: below 1 the other is faster. A third worker has
the installed Triton once more, as control: its ratio is what processes alone differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

CONTROL = "the same again"
LAYERS = ("qwen3_30b", "sonic_30b", "mixtral", "sonic_7b")
GEMMS = ("qwen3_30b", "mixtral")
ROWS, WIDTH = 65536, 4096  # of the kernels bound by memory


class Worker:
    """A process with one Triton, which runs what it is asked for and answers with a line of JSON."""

    def __init__(self, path: str | None) -> None:
        found = os.environ.get("PYTHONPATH", "")
        extra = (
            {"PYTHONPATH": f"{path}:{found}", "TRITON_CACHE_DIR": f"{path}/cache"} if path else {}
        )
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **extra},
        )  # fmt: skip

    def ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline() or '{"failed": "the worker ended"}')
        if isinstance(answer, dict) and "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer


def layer(name: str) -> dict[str, Any]:
    """Forward, and forward + backward, of a MoE layer."""
    import moe_layer
    from common import layers

    p = moe_layer.Problem(*moe_layer.SHAPES[name])
    forward = p.forwards([])["fuseops"]
    steps = {"fwd": layers.inference(forward)}
    return steps | {"fwd+bwd": layers.training_step(forward, p.dy, p.leaves)}


def gemms(name: str) -> dict[str, Any]:
    """The grouped GEMMs of both layers of an expert MLP, in bf16 and FP8."""
    from common import fp8_problems
    from common import grouped_problems as problems

    groups, rows, d, f, _ = problems.SHAPES[name]
    offs = problems.split("uniform", groups, rows)
    steps: dict[str, Any] = {}
    for fc, (n, k) in {"fc1": (2 * f, d), "fc2": (d, f)}.items():
        bf16 = problems.operands(groups, rows, n, k, offs)
        for kind in ("fwd", "dgrad", "wgrad", "wgrad_into"):
            steps[f"{fc}/{kind}"] = problems.ours(kind, bf16)
        fp8 = fp8_problems.operands(groups, rows, n, k, offs)
        for kind in ("fwd", "dgrad", "wgrad"):
            steps[f"{fc}/{kind}/fp8"] = fp8_problems.candidates(kind, fp8)["fp8"]
    return steps


def memory_bound(_: str) -> dict[str, Any]:
    """Norm and activation forward + backward."""
    import torch
    from common import layers
    from common.measure import rnd

    import fuseops as fo

    made = {
        "rmsnorm": fo.Sequential(fo.ops.RMSNorm(WIDTH, device="cuda", dtype=torch.bfloat16)),
        "swiglu": fo.Sequential(fo.ops.SwiGLU()),
    }
    steps = {}
    for name, op in made.items():
        x = rnd(ROWS, WIDTH).requires_grad_()
        dy = rnd(*op(x).shape)
        forward = partial(op, x)
        steps[name] = layers.training_step(forward, dy, (x, *op.parameters()))
    return steps


MAKE = {"layer": layer, "gemms": gemms, "memory_bound": memory_bound}


def work() -> None:
    """Answer the lines of standard input: make (kind, name), check, time (step, seconds), environment."""
    import torch
    from common import measure

    torch.manual_seed(0)
    steps: dict[str, Any] = {}
    laps: dict[tuple[str, float], int] = {}

    def make(kind: str, name: str) -> list[str]:
        steps.clear()
        laps.clear()
        torch.cuda.empty_cache()
        steps.update(MAKE[kind](name))
        for step in steps.values():
            step()
        torch.cuda.synchronize()
        return list(steps)

    def time(step: str, seconds: float) -> float:
        call, key = steps[step], (step, seconds)
        if key not in laps:
            laps[key] = measure.repeats(call, seconds)
        for _ in range(laps[key]):  # settles
            call()
        start = measure.mark()
        for _ in range(laps[key]):
            call()
        end = measure.mark()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / laps[key]

    does = {"make": make, "time": time, "environment": measure.environment}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = does[what](*arguments)
        except Exception as error:  # reported, not hidden
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)


def compare(workers: dict[str, Worker], kind: str, name: str, options: Any) -> dict[str, Any]:
    """Medians and ratios of each step."""
    from common import measure

    with ThreadPoolExecutor() as pool:  # kernels compile side by side
        asked = list(pool.map(lambda worker: worker.ask("make", kind, name), workers.values()))
    found = {}
    for step in asked[0]:
        timers = {
            release: partial(worker.ask, "time", step, options.span)
            for release, worker in workers.items()
        }
        us = measure.in_rounds(timers, options.rounds, heat=1)
        (_, mine), *others = us.items()
        ratios = {release: measure.paired(mine, theirs) for release, theirs in others}
        found[f"{name}/{step}"] = {"us": measure.medians(us), "ratios": ratios}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.set_defaults(budget=float("inf"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--other", type=Path, help="folder that holds another triton")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", default=tuple(MAKE), choices=tuple(MAKE))
    parser.add_argument("--only", nargs="*", default=LAYERS, help="layers and GEMMs of these sizes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--span", type=float, default=0.4, help="seconds of a step in a round")
    options = parser.parse_args()
    if options.worker:
        work()
        return
    if options.other is None or options.out is None:
        parser.error("--other and --out are needed")
    from common import measure, runs

    started = Worker(None), Worker(str(options.other))
    found = [worker.ask("environment") for worker in started]
    workers = {each["triton"]: worker for each, worker in zip(found, started, strict=True)}
    command = measure.environment()["command"]
    environment = {**found[0], "triton": " and ".join(workers), "command": command}
    workers[CONTROL] = Worker(None)
    run = runs.Run(options, settled={})
    run.report["environment"] = environment
    names = {
        "layer": [name for name in LAYERS if name in options.only],
        "gemms": [name for name in GEMMS if name in options.only],
        "memory_bound": ("65536x4096",),
    }
    for kind in options.parts:
        for name in names[kind]:
            make = partial(compare, workers, kind, name, options)
            run.note("settled", "", make, title=f"{kind}/{name}")


if __name__ == "__main__":
    main()
