"""Python overhead of a Sequential: eight Linear(16, 16), batch 16, forward and backward on one CPU thread.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json

In turn with plain `nn.Sequential`; medians in microseconds, and how many times as long ours takes. Of it, what every
call asks before the plan of the one before is taken: modes, hooks, replaced calls, and 16 parameters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import measure
from torch import nn

import fuseops as fo
from fuseops.plan.key import KeyGuard


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def timed(rounds: int, calls: int) -> dict[str, Any]:
    """Median microseconds a step of each, and their ratio round by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    ours = fo.Sequential(*(fo.ops.Linear(16, 16) for _ in range(8)))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(16, 16)
    models = {"nn.Sequential": plain, "fuseops.Sequential": ours}
    timers = {
        name: partial(measure.host_us, partial(step, model, x), calls)
        for name, model in models.items()
    }
    us = measure.in_rounds(timers, rounds, heat=1)
    timers = {"checks of a call": partial(measure.host_us, asked(ours, x), calls)}
    asks = measure.in_rounds(timers, rounds, heat=1)
    return measure.medians(us | asks) | {"ratio": measure.paired(*us.values())}


def asked(model: fo.Sequential, x: torch.Tensor) -> Callable[[], Any]:
    """The checks of a repeated call, alone."""
    found, fits = [], KeyGuard.fits

    def noted(guard: KeyGuard, *call: Any) -> bool:
        found.append(partial(fits, guard, *call))
        return fits(guard, *call)

    with mock.patch.object(KeyGuard, "fits", noted):
        model(x), model(x)
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {**measure.environment(), "microseconds": timed(options.rounds, options.calls)}
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
