"""A run of a script: what it was asked, and what it finds, cell by cell, in the file that it writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import measure

Found = dict[str, Any]
MACHINE = ("gpu", "torch", "triton", "liger-kernel", "transformers")  # of which one file speaks


class Run:
    """What was found so far: parts of cells by name, each printed and written at once, until the time is over.

    A run that is cut off leaves what it has; with `--resume` the next one goes on from there.
    summary: what is made of the whole report whenever it is written
    """

    def __init__(self, options: argparse.Namespace, *peers: str, **parts: Any) -> None:
        """peers: packages beside, whose versions the file names.   Raises SystemExit where `--resume` is asked for and
        the file is of another machine.
        """
        self.options, self.begun = options, time.perf_counter()
        self.summary: Callable[[Found], Found] | None = None
        self.report: Found = {"environment": measure.environment(*peers), **parts}
        if getattr(options, "resume", False) and options.out.exists():
            self._go_on(json.loads(options.out.read_text()))
        self.report |= {"skipped": [], "failed": {}}

    def _go_on(self, found: Found) -> None:
        then, now = found["environment"], self.report["environment"]
        if others := [key for key in MACHINE if then.get(key) != now.get(key)]:
            said = ", ".join(f"{key} {then.get(key)}, here {now.get(key)}" for key in others)
            raise SystemExit(f"{self.options.out} was written with {said}: name another --out.")
        found.setdefault("resumed", []).append(now["command"])
        self.report |= found

    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def late(self, what: Any) -> bool:
        """Whether it is too late to begin this."""
        late = self.seconds() > self.options.budget
        if late:
            self.report["skipped"].append(what)
        return late

    def note(self, part: str, name: str, make: Callable[[], Found], title: str = "") -> None:
        """Keep what `make` finds as this cell of the part; without a name, as all of its cells, of `title`."""
        what = f"{part} {name or title}"
        if self.late(what):
            return
        try:
            found: Any = make()
        except Exception as error:  # reported, not hidden
            found = f"{type(error).__name__}: {error}"[:500]
            self.report["failed"][what] = found
        else:
            cells = self.report.setdefault(part, {})
            cells.update({name: found} if name else found)
            short = found.get("tflops", found)
            found = json.dumps({k: v for k, v in short.items() if k != "kernels"})
        print(f"{self.seconds():.0f} s", what, found, flush=True)
        self.write()

    def each(self, cell: Callable[[str], Found], names: Iterable[str], part: str = "cells") -> None:
        """One cell for each of the names that the part lacks, with the memory of the one before freed."""
        cells = self.report.setdefault(part, {})
        torch.manual_seed(0)
        for name in names:
            if name not in cells:
                with fresh_memory():
                    self.note(part, name, partial(cell, name))
        print(json.dumps(self.report.get("summary", {})))

    def write(self) -> None:
        if self.summary is not None:
            self.report["summary"] = self.summary(self.report)
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.report, indent=1) + "\n")


@contextlib.contextmanager
def fresh_memory() -> Iterator[None]:
    """Frees what a cell held, compiled code and its graphs included."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main(
    doc: str | None,
    names: Iterable[str],
    cell: Callable[[str, argparse.Namespace], Found],
    summary: Callable[[Found], Found] | None = None,
    peers: Iterable[str] = (),
    more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> None:
    """The command line of a script that measures one cell for each of the names.

    doc: the script's.  summary: of the cells.  peers: packages whose versions the file names.  more: adds options of
    its own
    """
    parser = parser_of(doc)
    add_options(parser, names)
    more(parser)
    options = parser.parse_args()
    run = Run(options, *peers)
    if summary is not None:
        run.summary = lambda report: summary(report["cells"])
    run.each(partial(cell, options=options), options.only)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A command line that a script's docstring describes."""
    return argparse.ArgumentParser(description=(doc or "").splitlines()[0])


def add_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """What every benchmark of cells is told."""
    names = list(names)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How long, and whether from the begin."""
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--span", type=float, default=0.3, help="seconds timed of a candidate in a round"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no new cell after it")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What benchmarks of training steps are told beside."""
    parser.add_argument("--what", nargs="+", default=["fwd", "fwd+bwd"], choices=("fwd", "fwd+bwd"))
    parser.add_argument("--graphs", action="store_true", help="captured graphs beside eager")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--warm", action="store_true", help="compile and check, time nothing")
