"""`fuseops demo`: train a small mixture-of-experts language model, check it, and write a report."""

import argparse
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseops.demo import DEFAULT_STEPS

from .target import UsageError
from .terminal import number_option, print_json, progress, threads

PRETRAIN = Path(__file__).resolve().parents[2] / "examples" / "pretrain.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number_option(
        parser, "--steps", "training steps; with fewer no loss is required", DEFAULT_STEPS
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="cpu, cuda, cuda:1, ...; the default is the GPU when there is one, else the CPU",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the weights, the batches and the sample",
    )
    parser.add_argument(
        "--out",
        default="fuseops-demo",
        metavar="DIR",
        help="where the report is written (default fuseops-demo)",
    )
    text = "with more than one: pretrain over so many processes instead, examples/pretrain.py"
    number_option(parser, "--ranks", text, 1)


def run(args: argparse.Namespace) -> int:
    """Run the demo.  -> 0, 1 when a check or the loss bar fails"""
    if args.ranks > 1:
        return _run_over_ranks(args)
    from fuseops.demo import data, job  # the largest part: only this command pays for it

    try:
        device, corpus = job.device_of(args.device), data.read_corpus()
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    # Losses are not to depend on the number of cores. The tensors are small: a second thread gains a third on an idle
    # machine, and on a busy one the two wait for each other and everything takes several times as long.
    with threads(1):
        shown = progress("training", quiet=args.json, lines=False)
        outcome, path = job.run_job(args, device, corpus, shown)
    if args.json:
        print_json("demo", **outcome.to_json(path))
    return int(bool(outcome.failures))


def _run_over_ranks(args: argparse.Namespace) -> int:
    """`examples/pretrain.py` under torchrun, on CPUs unless `--device cuda` is given.   -> its exit code"""
    if not PRETRAIN.exists():
        raise UsageError(f"--ranks runs {PRETRAIN}, which is not there: use a checkout.")
    if args.json:
        raise UsageError("--json is of the demo on one process: leave out --ranks.")
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if not args.device.startswith("cuda"):
        env["CUDA_VISIBLE_DEVICES"] = ""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    steps = ["--steps", str(args.steps), "--seed", str(args.seed)]
    steps += ["--show", str(max(args.steps // 10, 1))]
    return _run_and_forward([sys.executable, *launch, str(PRETRAIN), *steps], env)


def _run_and_forward(command: list[str], env: Mapping[str, str]) -> int:
    """Run a command and forward its output; it is terminated when that fails.   -> its exit code"""
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe) as ran,
        selectors.DefaultSelector() as pipes,
    ):
        ends: Any = (ran.stdout, sys.stdout), (ran.stderr, sys.stderr)
        for end, out in ends:
            pipes.register(end, selectors.EVENT_READ, out)
        try:
            while pipes.get_map():
                for key, _ in pipes.select():
                    chunk = os.read(key.fd, 1 << 16)
                    key.data.buffer.write(chunk)
                    key.data.flush()
                    if not chunk:
                        pipes.unregister(key.fileobj)
        except BaseException:
            ran.terminate()
            raise
    return ran.returncode
