"""`fuseops offload-plan [PATH_OR_MODULE]`: what to keep, to move to the host and to recompute, and
what it costs. Without a target it plans an example; no GPU is needed.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fuseops import offload
from fuseops.errors import FuseOpsError
from fuseops.offload.planning.hardware import Hardware
from fuseops.offload.planning.html import page_of_ranks
from fuseops.offload.planning.plan import OffloadPlan
from fuseops.words import size

from .arguments import amount, positive
from .example import example
from .progress import progress
from .show import as_json, table
from .target import UsageError, add_target, load, writing

FAILED = 1


class Files(NamedTuple):
    """`Files` are the pages that were written of one plan."""

    html: Path | None
    trace: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, instead="an example of twelve blocks")
    parser.add_argument(
        "--peak",
        type=amount,
        metavar="BYTES",
        help="most on the device, such as 11GiB; default: what costs no time leaves",
    )
    parser.add_argument(
        "--host", type=amount, metavar="BYTES", help="most of host memory; default: no limit"
    )
    parser.add_argument(
        "--layers",
        action="append",
        metavar="GLOB",
        help="modules whose saved tensors leave and come back together, such as 'blocks.*'; "
        "default: the model's largest list of modules",
    )
    parser.add_argument(
        "--hardware",
        type=Path,
        metavar="FILE",
        help="what `fuseops env --measure --json` printed; default: this GPU, else an H200",
    )
    parser.add_argument(
        "--record", action="store_true", help="run the step and measure it, instead of a dry run"
    )
    parser.add_argument("--every", action="store_true", help="one line a tensor")
    parser.add_argument(
        "--wide", action="store_true", help="with times on the link; takes 120 columns"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a timeline page to FILE")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome/Perfetto trace to FILE"
    )
    pipeline = parser.add_argument_group(
        "a pipeline",
        "One plan a rank, one page for all and one trace each; the target is one micro-batch.",
    )
    pipeline.add_argument(
        "--ranks", type=positive, metavar="N", help="GPUs that hold the model's layers in turn"
    )
    pipeline.add_argument(
        "--micro-batches", type=positive, metavar="N", help="of one step (default 8)"
    )
    pipeline.add_argument(
        "--chunks", type=positive, metavar="N", help="parts of the model a rank; more: interleaved"
    )


def run(args: argparse.Namespace) -> int:
    pipeline = _pipeline(args)
    target = example() if args.target is None else load(args.target)
    hardware = None if args.hardware is None else _hardware(args.hardware)
    with progress("planning", quiet=args.json, lines=False) as told:
        plan = offload.plan(
            target.model,
            *target.args,
            hardware=hardware,
            peak=args.peak,
            host=args.host,
            layers=args.layers,
            record=args.record,
            progress=told,
            **target.side,
        )
    if pipeline is None:
        return _one(plan, target.name, args)
    plans = offload.plan_pipeline(plan.profile, plan.hardware, pipeline, plan.limits)
    return _ranks(plans, target.name, pipeline, args)


def _hardware(path: Path) -> Hardware:
    try:
        return Hardware.load(path)
    except FuseOpsError as error:
        raise UsageError(str(error)) from None


def _pipeline(args: argparse.Namespace) -> offload.Pipeline | None:
    if args.ranks is not None:
        return offload.Pipeline(args.ranks, args.micro_batches or 8, args.chunks or 1)
    if args.micro_batches is not None or args.chunks is not None:
        raise UsageError("--micro-batches and --chunks are of a pipeline: give --ranks too.")
    return None


def _one(plan: OffloadPlan, name: str, args: argparse.Namespace) -> int:
    written = _write_files([plan], args)
    if args.json:
        as_json("offload-plan", target=name, **_with_files(plan, written[0]))
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        print(plan.explain(args.every, args.wide, columns))
        _print_files(written)
    return 0 if plan.fits else FAILED


def _ranks(
    plans: Sequence[OffloadPlan], name: str, pipeline: offload.Pipeline, args: argparse.Namespace
) -> int:
    written = _write_files(plans, args)
    if args.json:
        shown = {"target": name, "pipeline": pipeline._asdict()}
        as_json("offload-plan", **shown, ranks=[*map(_with_files, plans, written)])
    else:
        header = ("rank", "peak", "planned", "where", "offload", "stall ms", "step ms")
        table(header, [_rank_row(k, rank) for k, rank in enumerate(plans)])
        _print_files(written)
    return 0 if all(rank.fits for rank in plans) else FAILED


def _rank_row(rank: int, plan: OffloadPlan) -> tuple[str, ...]:
    before, after = plan.before, plan.after
    sizes = (size(before.peak), size(after.peak), plan.owner(after), size(after.moved))
    return (str(rank), *sizes, f"{after.stall * 1e3:.2f}", f"{after.seconds * 1e3:.2f}")


def _write_files(plans: Sequence[OffloadPlan], args: argparse.Namespace) -> list[Files]:
    """Write the page of all plans and the trace of each that were asked for.   -> the files of every plan"""
    if args.html is not None:
        text = plans[0].to_html() if len(plans) == 1 else page_of_ranks(plans)
        with writing(args.html):
            args.html.write_text(text, "utf-8")
    traces = _traces(plans, args.trace)
    return [Files(args.html, trace) for trace in traces]


def _traces(plans: Sequence[OffloadPlan], path: Path | None) -> list[Path | None]:
    """Save the trace of every plan: to `path`, or of several to `<stem>.rank<k>`.   -> its file"""
    if path is None:
        return [None] * len(plans)
    several = len(plans) > 1
    paths = [path.with_stem(f"{path.stem}.rank{k}") if several else path for k in range(len(plans))]
    for plan, file in zip(plans, paths, strict=True):
        with writing(file):
            plan.save_trace(file)
    return [*paths]


def _with_files(plan: OffloadPlan, files: Files) -> dict[str, Any]:
    return {
        **plan.to_json(),
        **{what: path and str(path) for what, path in files._asdict().items()},
    }


def _print_files(written: Sequence[Files]) -> None:
    for path in dict.fromkeys(path for files in zip(*written, strict=True) for path in files):
        if path is not None:
            print(f"wrote {path}")
