"""Python overhead of a Sequential: eight Linear(16, 16), batch 16, forward and backward on one CPU thread.

    python benchmarks/overhead.py [--rounds 40] [--out FILE]

Interleaved with plain `nn.Sequential`; prints medians in microseconds and their ratio.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import environment
from torch import nn

import fuseops as fo


def step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model(x).sum().backward()

    return run


def timed(run: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def measure(rounds: int, calls: int) -> dict[str, float]:
    """Median microseconds a step of each, candidates interleaved round by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    ours = fo.Sequential(*(fo.ops.Linear(16, 16) for _ in range(8)))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(16, 16)
    runs = {"nn.Sequential": step(plain, x), "fuseops.Sequential": step(ours, x)}
    for run in runs.values():
        timed(run, calls)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, calls))
    result = {name: statistics.median(values) for name, values in times.items()}
    result["ratio"] = result["fuseops.Sequential"] / result["nn.Sequential"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {**environment(), "microseconds": measure(args.rounds, args.calls)}
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
