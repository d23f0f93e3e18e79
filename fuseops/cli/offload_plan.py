"""`fuseops offload-plan [PATH_OR_MODULE]`: what to keep, to move to the host and to recompute, and
what it costs. Without a target it plans an example; no GPU is needed.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fuseops import offload
from fuseops.errors import FuseOpsError
from fuseops.offload.planning.hardware import Hardware
from fuseops.offload.planning.html import page_of_ranks
from fuseops.offload.planning.plan import OffloadPlan
from fuseops.offload.planning.text import ranks

from .example import example
from .target import UsageError, add_target, load, writing
from .terminal import byte_count, file_option, number_option, print_json, print_table, progress

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, instead="an example of twelve blocks")
    parser.add_argument(
        "--peak",
        type=byte_count,
        metavar="BYTES",
        help="most on the device, such as 11GiB; default: what costs no time leaves",
    )
    parser.add_argument(
        "--host", type=byte_count, metavar="BYTES", help="most of host memory; default: no limit"
    )
    parser.add_argument(
        "--layers",
        action="append",
        metavar="GLOB",
        help="modules whose saved tensors leave and come back together, such as 'blocks.*'; "
        "default: the model's largest list of modules",
    )
    text = "what `fuseops env --measure --json` printed; default: this GPU, else an H200"
    file_option(parser, "--hardware", text)
    parser.add_argument(
        "--record", action="store_true", help="run the step and measure it, instead of a dry run"
    )
    parser.add_argument("--every", action="store_true", help="one line a tensor")
    parser.add_argument(
        "--wide", action="store_true", help="with times on the link; takes 120 columns"
    )
    file_option(parser, "--html", "write a timeline page to FILE")
    file_option(parser, "--trace", "write a Chrome/Perfetto trace to FILE")
    pipeline = parser.add_argument_group(
        "a pipeline",
        "One plan a rank, one page for all and one trace each; the target is one micro-batch.",
    )
    number_option(pipeline, "--ranks", "GPUs that hold the model's layers in turn")
    number_option(pipeline, "--micro-batches", "of one step (default 8)")
    number_option(pipeline, "--chunks", "parts of the model a rank; more: interleaved")


def run(args: argparse.Namespace) -> int:
    pipeline = _pipeline(args)
    target = example() if args.target is None else load(args.target)
    hardware = None if args.hardware is None else _hardware(args.hardware)
    with progress("planning", quiet=args.json, lines=False) as report:
        plan = offload.plan(
            target.model,
            *target.args,
            hardware=hardware,
            peak=args.peak,
            host=args.host,
            layers=args.layers,
            record=args.record,
            progress=report,
            **target.side,
        )
    if pipeline is None:
        return _show_plan(plan, target.name, args)
    plans = offload.plan_pipeline(plan.profile, plan.hardware, pipeline, plan.limits)
    return _show_ranks(plans, target.name, pipeline, args)


def _hardware(path: Path) -> Hardware:
    try:
        return Hardware.load(path)
    except FuseOpsError as error:
        raise UsageError(str(error)) from None


def _pipeline(args: argparse.Namespace) -> offload.Pipeline | None:
    if args.ranks is not None:
        if args.every or args.wide:
            raise UsageError("--every and --wide show the tensors of one plan: leave out --ranks.")
        return offload.Pipeline(args.ranks, args.micro_batches or 8, args.chunks or 1)
    if args.micro_batches is not None or args.chunks is not None:
        raise UsageError("--micro-batches and --chunks are of a pipeline: give --ranks too.")
    return None


def _show_plan(plan: OffloadPlan, name: str, args: argparse.Namespace) -> int:
    (files,) = _write_files([plan], args)
    if args.json:
        print_json("offload-plan", target=name, **plan.to_json(), **files)
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        print(plan.explain(args.every, args.wide, columns))
        _print_files([files])
    return 0 if plan.fits else FAILED


def _show_ranks(
    plans: Sequence[OffloadPlan], name: str, pipeline: offload.Pipeline, args: argparse.Namespace
) -> int:
    written = _write_files(plans, args)
    if args.json:
        rows = [plan.to_json() | files for plan, files in zip(plans, written, strict=True)]
        print_json("offload-plan", target=name, pipeline=asdict(pipeline), ranks=rows)
    else:
        print_table(ranks(plans))
        _print_files(written)
    return 0 if all(rank.fits for rank in plans) else FAILED


Files = dict[str, str | None]
"""The files written for a plan: the page of all plans, and its own trace."""


def _write_files(plans: Sequence[OffloadPlan], args: argparse.Namespace) -> list[Files]:
    """Write the requested files; with several plans, the trace of each to `<stem>.rank<k>`."""
    page, trace, found = args.html, args.trace, []
    if page is not None:
        text = plans[0].to_html() if len(plans) == 1 else page_of_ranks(plans)
        with writing(page):
            page.write_text(text, "utf-8")
    for k, plan in enumerate(plans):
        file = trace
        if trace is not None:
            file = trace.with_stem(f"{trace.stem}.rank{k}") if len(plans) > 1 else trace
            with writing(file):
                plan.save_trace(file)
        found.append({"html": page and str(page), "trace": file and str(file)})
    return found


def _print_files(written: Sequence[Files]) -> None:
    for path in dict.fromkeys(files[what] for what in ("html", "trace") for files in written):
        if path is not None:
            print(f"wrote {path}")
