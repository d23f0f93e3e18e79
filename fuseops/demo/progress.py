"""Where the demo speaks, and its progress bar: rich on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .train import History, Watcher

LINES = 10  # in plain form


class Voice:
    """Prints to stdout, or to stderr when stdout belongs to a JSON object."""

    def __init__(self, json: bool) -> None:
        self.stream: TextIO = sys.stderr if json else sys.stdout

    def say(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    @contextmanager
    def progress(self, steps: int) -> Iterator[Watcher]:
        """Shows training as it goes; the watcher is called after each step."""
        rich = _rich() if self.stream.isatty() else None
        if rich is None:
            yield self._plain(steps)
        else:
            yield from _bar(rich, steps, self.stream)

    def _plain(self, steps: int) -> Watcher:
        every = max(1, steps // LINES)

        def watch(step: int, history: History) -> None:
            if step % every == 0 or step == steps:
                self.say(f"  step {step:>{len(str(steps))}}/{steps}  {described(history)}")

        return watch


def described(history: History) -> str:
    """The state of training in one line."""
    recent = history.train[-20:]
    rate = history.bytes_seen / max(history.seconds, 1e-9)
    return (
        f"train {sum(recent) / len(recent):.3f}  held out {history.held_out[-1][1]:.3f} nats/byte  "
        f"{rate / 1e3:.0f} kB/s"
    )


def _rich() -> Any:
    try:
        import rich.console
        import rich.progress
    except ImportError:
        return None
    return rich


def _bar(rich: Any, steps: int, stream: TextIO) -> Iterator[Watcher]:
    columns = (
        rich.progress.TextColumn("  training"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=rich.console.Console(file=stream)) as bar:
        task = bar.add_task("", total=steps)
        yield lambda step, history: bar.update(task, completed=step, description=described(history))
