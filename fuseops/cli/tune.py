"""`fuseops tune`: time the kernels that a model launches on this GPU, and keep the fastest configurations."""

import argparse
from functools import partial

import torch

from fuseops.kernels import configs
from fuseops.kernels.registry import Call, meta, watch_launches

from .bench import training_step
from .target import UsageError, add_target, load
from .terminal import print_json, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, where=", on CUDA")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("tuning times kernels on a GPU, and torch sees no CUDA device.")
    target = load(args.target)
    with watch_launches() as calls_seen:
        training_step(target)()
    calls = distinct(calls_seen)
    if not calls:
        raise UsageError(f"{target.name} launches no kernel: is the model on CUDA?")
    found: dict[str, configs.Config] = {}
    for number, (op, positional, keywords) in enumerate(calls, 1):
        with progress(f"[{number}/{len(calls)}] {op.name}", quiet=args.json) as report:
            call = partial(op.launcher, *positional, **keywords)
            found.update(configs.tune(call, progress=report))
    if args.json:
        print_json("tune", file=str(configs.cache_file()), configurations=found)
    else:
        print(f"{len(found)} configurations written to {configs.cache_file()}")
    return 0


def distinct(calls: list[Call]) -> list[Call]:
    """The calls without repetitions of a kernel with the same argument shapes and options."""
    return list(
        {
            repr((op.name, *map(meta, (args, kw.values())))): (op, args, kw)
            for op, args, kw in calls
        }.values()
    )
