"""The main job, `python -m fuseops demo`: train a small mixture of experts and check it."""

import argparse

from fuseops.cli.arguments import positive

DEFAULT_STEPS = 300  # what the bar on the held-out loss is set for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options. Light: nothing is imported before `run`."""
    parser.add_argument(
        "--steps",
        type=positive,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"training steps (default {DEFAULT_STEPS}); with fewer no loss is required",
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
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="with more than one: pretrain over so many processes instead, examples/pretrain.py",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; what happens goes to stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo.  -> 0, 1 when a check or the loss bar fails, 2 when it cannot start."""
    if args.ranks > 1:
        from .ranks import run_ranks

        return run_ranks(args)
    from .job import run_job

    return run_job(args)
