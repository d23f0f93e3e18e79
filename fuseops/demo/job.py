"""The demo from start to end."""

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.cli.show import as_json
from fuseops.words import size

from . import DEFAULT_STEPS, plans, report
from .checks import Checked, check
from .data import Corpus, batch, bigram_log_probs, bigram_loss, read_corpus, windows
from .model import ByteModel, Config
from .progress import Voice
from .train import History, LearningRate, evaluate, printable, sample, train

MARGIN = 0.15  # nats a byte that the model must be below the bigram model
GLANCES = 64  # about as many held-out windows are looked at on the way
PROMPT = b"class Reader:\n    def __init__(self, "
SAMPLE_BYTES = 400


class Outcome(NamedTuple):
    """An outcome holds everything that the job found."""

    args: argparse.Namespace
    device: torch.device
    corpus: Corpus
    parameters: int
    history: History
    bigram: float
    held_out: float
    checked: Checked
    sample: str
    seconds: float

    @property
    def enforced(self) -> bool:
        """Only a full run owes a good loss."""
        return self.args.steps >= DEFAULT_STEPS

    @property
    def bar(self) -> float:
        return self.bigram - MARGIN

    @property
    def failures(self) -> list[str]:
        return [sentence for passed, sentence in verdicts(self) if passed is False]


def run_job(args: argparse.Namespace) -> int:
    """Train, check, report.  -> exit code"""
    voice = Voice(args.json)
    try:
        device = device_of(args.device)
        corpus = read_corpus()
    except (ValueError, FileNotFoundError) as error:
        print(f"fuseops demo: {error}", file=sys.stderr)
        return 2
    with one_thread():
        outcome, found = _work(args, device, corpus, voice)
    for line in verdict_lines(outcome):
        voice.say(line)
    path = report.write(_report(outcome, found), Path(args.out))
    if args.json:
        as_json("demo", **in_json(outcome, path))
    voice.say(f"report: {path}" if args.json else str(path))
    return 1 if outcome.failures else 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU ops on one thread, so that losses do not depend on the number of cores.

    The tensors are small: a second thread gains a third on an idle machine, and on a busy one the
    two wait for each other and everything takes several times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    args: argparse.Namespace, device: torch.device, corpus: Corpus, voice: Voice
) -> tuple[Outcome, list[Any]]:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    config, schedule = Config(), LearningRate(args.steps)
    model = ByteModel(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    judged = windows(corpus.held_out, config.context)
    bigram = bigram_loss(bigram_log_probs(corpus.train), judged)
    voice.say(
        f"{len(corpus.train) / 1e6:.1f} MB of Python from {corpus.root}, "
        f"{len(corpus.held_out) / 1e3:.0f} kB of other files held out"
    )
    voice.say(
        f"{parameters / 1e3:.0f} k parameters, {config.experts} experts of which each byte takes "
        f"{config.top_k}, on {described(device)}"
    )
    text = _batch(corpus.train, schedule, config, args.seed, device)
    found = plans.plans_of(model, text[:, :-1])
    voice.say("\nfusion plan in short (all of it is in the report)")
    for line in plans.lines(found):
        voice.say(line)
    voice.say("\ntraining (on the way a part of the held-out text is judged)")
    with voice.progress(args.steps) as watch:
        history = train(
            model,
            corpus.train,
            judged[:: max(1, len(judged) // GLANCES)],
            schedule,
            args.seed,
            watch,
        )
    held_out = evaluate(model, judged)
    checked = check(model, text)
    written = printable(sample(model, PROMPT, SAMPLE_BYTES, args.seed))
    voice.say(f"\nsample\n{_indented(written)}\n")
    seconds = time.perf_counter() - start
    outcome = Outcome(
        args, device, corpus, parameters, history, bigram, held_out, checked, written, seconds
    )
    return outcome, found


def _batch(
    text: Tensor, schedule: LearningRate, config: Config, seed: int, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return batch(text, schedule.batch, config.context, generator).to(device)


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def described(device: torch.device) -> str:
    """The name of a GPU, or what the CPU is used as."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "one thread of the CPU"


# --- what is said of it


def verdicts(o: Outcome) -> Iterator[tuple[bool | None, str]]:
    """(passed, sentence) for each thing that the demo must show; None where nothing is owed."""
    yield from o.checked.verdicts()
    reached = o.held_out <= o.bar
    yield (
        reached if o.enforced else None,
        f"loss {o.held_out:.3f} nats a byte on all held-out text; byte bigrams {o.bigram:.3f}, so the bar is "
        f"{o.bar:.3f}" + ("" if o.enforced else f" (not enforced below {DEFAULT_STEPS} steps)"),
    )


def verdict_lines(o: Outcome) -> Iterator[str]:
    words = {True: "ok", False: "FAILED", None: "--"}
    for passed, sentence in verdicts(o):
        yield f"{words[passed]:>6}  {sentence}"
    c = o.checked
    yield (
        f"        saved for the backward: {size(c.saved_unfused)} unfused, {size(c.saved_fused)} "
        f"fused, {size(c.saved_offloaded)} fused and offloaded"
    )
    yield f"        {o.seconds:.0f} s, of which {o.history.seconds:.0f} s training"


def _report(o: Outcome, found: list[Any]) -> report.Page:
    busiest = max(max(shares) for shares in o.history.shares)
    return report.Page(
        title="fuseops demo",
        facts=[
            ("text", f"{o.corpus.files} files of {o.corpus.root}, {len(o.corpus.train)} bytes"),
            ("model", f"{o.parameters} parameters"),
            ("steps", f"{o.args.steps} on {described(o.device)}, seed {o.args.seed}"),
            ("time", f"{o.seconds:.0f} s, of which {o.history.seconds:.0f} s training"),
            ("routing", f"the busiest expert gets {100 * busiest:.0f} % of the rows"),
            ("versions", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ],
        verdicts=list(verdicts(o)),
        history=o.history,
        bigram=o.bigram,
        held_out=o.held_out,
        saved=[
            ("unfused", o.checked.saved_unfused),
            ("fused", o.checked.saved_fused),
            ("fused and offloaded", o.checked.saved_offloaded),
        ],
        plans=found,
        sample=o.sample,
    )


def in_json(o: Outcome, path: Path) -> dict[str, Any]:
    """What it found as plain data."""
    c = o.checked
    return {
        "passed": not o.failures,
        "failures": o.failures,
        "steps": o.args.steps,
        "seed": o.args.seed,
        "device": str(o.device),
        "parameters": o.parameters,
        "loss": {
            "unit": "nats a byte",
            "held_out": o.held_out,
            "bigram": o.bigram,
            "bar": o.bar,
            "bar_enforced": o.enforced,
            "train": o.history.train,
            "held_out_on_the_way": o.history.held_out,
        },
        "fused_spans": c.fused_spans,
        "fused_vs_unfused": {**c.fusion._asdict(), "tolerance": c.tolerance},
        "offloaded_bytes": c.offloaded_bytes,
        "offloaded_unequal": list(c.offload_unequal),
        "saved_bytes": {
            "unfused": c.saved_unfused,
            "fused": c.saved_fused,
            "fused_and_offloaded": c.saved_offloaded,
        },
        "expert_shares": o.history.shares,
        "seconds": {"total": o.seconds, "training": o.history.seconds},
        "sample": o.sample,
        "report": str(path),
    }
