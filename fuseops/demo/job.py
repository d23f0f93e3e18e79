"""The demo from start to end."""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from fuseops.explain import explain
from fuseops.explain.layout import groups, miss_rows
from fuseops.plan.records import Planned

from . import report
from .checks import check
from .data import Corpus, batch, bigram_log_probs, bigram_loss, windows
from .model import ByteModel, Config
from .outcome import Outcome, described
from .train import History, LearningRate, evaluate, printable, sample, train

GLANCES = 64  # about as many held-out windows are looked at on the way
PROMPT = b"class Reader:\n    def __init__(self, "
SAMPLE_BYTES = 400
LINES = 10  # of training
Say = Callable[[str], None]
Progress = AbstractContextManager[Callable[[str, int, int], None]]
"""Inside of it the training says how it goes, at which step of how many."""


def run_job(
    args: argparse.Namespace, device: torch.device, corpus: Corpus, progress: Progress
) -> tuple[Outcome, Path]:
    """Train, check, and write the report.   -> what was found, and where the report is"""
    stream = sys.stderr if args.json else sys.stdout  # which belongs to a JSON object
    say = partial(print, file=stream, flush=True)
    outcome = _work(args, device, corpus, say, progress)
    for line in outcome.lines():
        say(line)
    path = report.write(outcome, Path(args.out))
    say(f"report: {path}" if args.json else str(path))
    return outcome, path


def device_of(name: str) -> torch.device:
    """The device that was asked for.  Raises ValueError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a device") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _work(
    args: argparse.Namespace, device: torch.device, corpus: Corpus, say: Say, progress: Progress
) -> Outcome:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    config, schedule = Config(), LearningRate(args.steps)
    model = ByteModel(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    judged = windows(corpus.held_out, config.context)
    bigram = bigram_loss(bigram_log_probs(corpus.train), judged)
    say(
        f"{len(corpus.train) / 1e6:.1f} MB of Python from {corpus.root}, "
        f"{len(corpus.held_out) / 1e3:.0f} kB of other files held out"
    )
    say(
        f"{parameters / 1e3:.0f} k parameters, {config.experts} experts of which each byte takes "
        f"{config.top_k}, on {described(device)}"
    )
    generator = torch.Generator().manual_seed(args.seed)
    text = batch(corpus.train, schedule.batch, config.context, generator).to(device)
    found = explain(model, text[:, :-1])
    say("\nfusion plan in short (all of it is in the report)")
    for line in _in_short(found.plans):
        say(line)
    say("\ntraining (on the way a part of the held-out text is judged)")
    every, glances = max(1, args.steps // LINES), judged[:: max(1, len(judged) // GLANCES)]
    with progress as told:

        def watch(step: int, history: History) -> None:
            told(str(history), step, args.steps)
            if step % every == 0 or step == args.steps:
                say(f"  step {step:>{len(str(args.steps))}}/{args.steps}  {history}")

        history = train(model, corpus.train, glances, schedule, args.seed, watch)
    held_out = evaluate(model, judged)
    checked = check(model, text)
    written = printable(sample(model, PROMPT, SAMPLE_BYTES, args.seed))
    say(f"\nsample\n{textwrap.indent(written, '  | ', lambda line: True)}\n")
    seconds = time.perf_counter() - start
    return Outcome(
        *(args, device, corpus, parameters, history, bigram, held_out),
        *(checked, found, written, seconds),
    )


def _in_short(found: Sequence[Planned]) -> Iterator[str]:
    """What fused and what did not, equal Sequentials once."""
    for group in groups([plan for plan in found if plan.forward]):
        yield f"  {group.title}"
        fused = set(group.plan.fused)
        for span in group.plan.fused:
            yield f"    fused      {span} ({span.kind})"
        alone = [str(s) for s in group.plan.forward if s not in fused and s.kind == "op"]
        if alone:
            yield f"    alone      {', '.join(alone)}"
        for rules, where, why in miss_rows(group.plan):
            yield f"    not fused  {rules} at {where}: {why}"
