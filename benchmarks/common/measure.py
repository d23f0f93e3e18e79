"""What benchmarks share: what ran them, timing in turn, ratios round by round with their interval."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import fuseops as fo
from fuseops.kernels import configs

Call = Callable[[], Any]
T = TypeVar("T")


def environment(*peers: str) -> dict[str, Any]:
    """What the figures belong to: when they were measured, how, and with what; peers: their packages."""
    words = (Path(word).name if word.endswith((".json", ".py")) else word for word in sys.argv)
    found = {
        "date": datetime.date.today().isoformat(),
        "fuseops": fo.__version__,
        "python": platform.python_version(),
        **configs.versions(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(["python", *words]),
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {"gpu": device.name, "sms": device.multi_processor_count}
    for name in peers:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def rnd(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).mul_(scale)


Rounds = dict[str, list[float]]  # microseconds of a call, by candidate, in each round


def orders(names: Iterable[str]) -> Iterator[list[str]]:
    """`balanced` orders of the names, one after another, without end."""
    names = list(names)
    return itertools.cycle([names[place] for place in order] for order in balanced(len(names)))


def in_rounds(timers: Mapping[str, Callable[[], T]], rounds: int, heat: int) -> dict[str, list[T]]:
    """What each timer gives, once in every round, in `balanced` order. The first `heat` rounds only heat."""
    found: dict[str, list[T]] = {name: [] for name in timers}
    for number, order in enumerate(itertools.islice(orders(timers), heat + rounds)):
        for name in order:
            reading = timers[name]()
            if number >= heat:
                found[name].append(reading)
    return found


def in_turn(calls: Mapping[str, Call], rounds: int, span: float) -> Rounds:
    """Microseconds of a call, hot: in every round each is called for `span` seconds, and timed for as long.

    A GPU at its power limit owes its clock to what ran before: an H200 that was idle for 30 ms runs the next
    40 ms up to 12 % faster, then slower than it settles at, and goes on swinging by 3 % for 0.3 to 0.6 s. So nobody
    follows the same candidate in every round, the GPU has work when the one before ends, the clock starts late, and a
    first round only heats. Medians of rounds of 0.1 s came out 4 % apart, of 0.35 s less than 1 %.
    """
    return mixes_in_turn({name: {"": call} for name, call in calls.items()}, rounds, span)[""]


def mixes_in_turn(
    mixes: Mapping[str, Mapping[str, Call]], rounds: int, span: float
) -> dict[str, Rounds]:
    """The same of candidates that are several calls each, made one after another and over again, as in a training
    step: the microseconds of each call by its name, at the clock that the mix of its candidate settles at.
    """
    laps = {name: repeats(lambda mix=mix: run(mix), span) for name, mix in mixes.items()}
    end = torch.cuda.Event()

    def marks(name: str) -> list[Any]:
        nonlocal end
        mix, found = mixes[name], []
        next(iter(mix.values()))()
        end.synchronize()  # from here on the host is no further ahead than it gets by itself
        for _ in range(laps[name]):
            run(mix)
        found.append(mark())
        for lap in range(1, laps[name] + 1):
            for call in mix.values():
                call()
                if len(mix) > 1 or lap == laps[name]:  # nothing between the calls of one
                    found.append(mark())
        end = found[-1]
        return found

    spans = in_rounds({name: partial(marks, name) for name in mixes}, rounds, heat=1)
    end.synchronize()
    found: dict[str, Rounds] = {}
    for name, mix in mixes.items():
        for place, part in enumerate(mix):
            found.setdefault(part, {})[name] = [
                sum(a.elapsed_time(b) for a, b in list(itertools.pairwise(span))[place :: len(mix)])
                * 1e3
                / laps[name]
                for span in spans[name]
            ]
    return found


def run(mix: Mapping[str, Call]) -> None:
    for call in mix.values():
        call()


def mark() -> Any:
    """An event on the device, now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_us(call: Call) -> float:
    """Microseconds of a single call on the device, which the host waits for."""
    start = mark()
    call()
    end = mark()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def host_us(call: Call, repeat: int) -> float:
    """Microseconds of a call on the host, which waits for nothing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def repeats(call: Call, span: float) -> int:
    """How many calls take so many seconds, at least one: by the faster of two, after a first."""
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return max(round(span / min(took[1:])), 1)


def balanced(n: int) -> list[list[int]]:
    """Orders of n things, in which everyone stands at every place, and comes after every other, equally often
    (E. J. Williams, Australian Journal of Scientific Research A 2, 1949): n orders, of odd n twice as many.
    """
    zigzag = [(k + 1) // 2 if k % 2 else n - k // 2 for k in range(n)]  # 0, 1, n - 1, 2, n - 2, ...
    rows = [[(first + z) % n for z in zigzag] for first in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def medians(us: Rounds, digits: int = 1) -> dict[str, float]:
    return {name: round(statistics.median(found), digits) for name, found in us.items()}


def paired(mine: list[float], peer: list[float]) -> dict[str, Any]:
    """How many times as fast as the peer: the median of the ratios of the rounds that both ran, and its interval."""
    ratios = [theirs / ours for theirs, ours in zip(peer, mine, strict=False)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(end, 4) for end in median_interval(ratios)],
    }


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact value; NaN is infinite."""
    error = (got.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(1e-30)
    return math.inf if error.isnan() else error.item()


def median_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Between which two of the values the median of what they were drawn from lies, with that
    probability at least, whatever the distribution: of n fair coins, no more than k heads. Below six
    values the least and the greatest, which are less sure.
    """
    found = sorted(values)
    n, k, outside = len(found), 0, 1.0
    while 2 * (outside + math.comb(n, k + 1)) <= (1 - level) * 2**n:
        k += 1
        outside += math.comb(n, k)
    return found[k], found[n - 1 - k]


def geomean(values: Iterable[float]) -> float:
    return round(math.exp(statistics.fmean(map(math.log, values))), 3)
