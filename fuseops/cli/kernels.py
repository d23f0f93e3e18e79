"""`fuseops kernels`: registers, spills and shared memory of every kernel, from the table compiled ahead of time."""

import argparse
import difflib
from typing import Any

from fuseops.kernels import aot, configs
from fuseops.kernels.launch import HAS_TRITON

from .target import UsageError
from .terminal import number_option, print_json, print_table

MEASURED = ("registers", "spilled B", "shared B", "tensor cores", "note")
OPTIONS = {
    "--check": ("sample", "jobs"),
    "--rebuild": ("all", "jobs"),
    "the table": ("arch", "kernel", "variants"),
}
"""What each way to call the command takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", type=int, choices=aot.ARCHS, help="one architecture only")
    parser.add_argument(
        "--kernel", default="", metavar="TEXT", help="kernels whose name contains this"
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="a line a variant, not a kernel; behind a type ' says that it is a multiple of 16",
    )
    parser.add_argument(
        "--check", action="store_true", help="fail on a stale or missing row, compile a sample"
    )
    number_option(parser, "--sample", "rows that --check compiles (default 12)")
    parser.add_argument("--rebuild", action="store_true", help="compile the rows that changed")
    parser.add_argument("--all", action="store_true", help="with --rebuild: every row")
    number_option(parser, "--jobs", "processes that compile (default 1)")


def run(args: argparse.Namespace) -> int:
    if args.check and args.rebuild:
        raise UsageError("--check compares and --rebuild writes: give one of them.")
    _check_options(args)
    if (args.check or args.rebuild) and not HAS_TRITON:
        raise UsageError("compiling needs triton, and it is not installed.")
    if args.check:
        return _check(args)
    if args.rebuild:
        return _rebuild(args)
    records = table_records()
    rows = [
        r for r in records if args.kernel in r["kernel"] and r["arch"] == (args.arch or r["arch"])
    ]
    if not records:
        raise UsageError(
            f"{aot.table_path().name} is not here: it is part of a checkout, not of the wheel."
        )
    if not rows:
        raise UsageError(_unknown_kernel(args, sorted({r["kernel"] for r in records})))
    if args.json:
        print_json("kernels", triton=configs.versions()["triton"], kernels=rows)
        return 0
    if args.variants:  # a variant is long, so it comes last
        variants = (
            [r["kernel"], f"sm_{r['arch']}", r["triton"], *_cells([r]), r["variant"]] for r in rows
        )
        print_table([("kernel", "arch", "triton", *MEASURED, "variant"), *variants])
    else:
        print_table([("kernel", "arch", "triton", "variants", *MEASURED), *_kernel_rows(rows)])
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that would do nothing."""
    way = "--check" if args.check else "--rebuild" if args.rebuild else "the table"
    for name in sorted(set[str]().union(*OPTIONS.values()).difference(OPTIONS[way])):
        if getattr(args, name):
            owners = " and ".join(other for other, names in OPTIONS.items() if name in names)
            raise UsageError(f"--{name} is of {owners}, and does nothing to {way}: leave it out.")


def _unknown_kernel(args: argparse.Namespace, names: list[str]) -> str:
    where = "" if args.arch is None else f" for sm_{args.arch}"
    close = difflib.get_close_matches(args.kernel, names, n=5, cutoff=0.4)
    hint = f"The closest are {', '.join(close)}. " if close else ""
    return (
        f"no kernel's name contains {args.kernel!r}{where}. {hint}"
        f"`fuseops kernels` without --kernel lists all {len(names)}."
    )


def table_records() -> list[dict[str, Any]]:
    """The rows of the committed tables: of this Triton release, and for kernels missing there, of the pinned one."""
    records: list[dict[str, Any]] = []
    for release in dict.fromkeys((configs.triton_release(), aot.PINNED)):
        rows, known = aot.read_table(release), {r["kernel"] for r in records}
        triton = aot.table_version(release) if rows else ""
        for key, row in rows.items():
            kernel, rest = key.split(" ", 1)
            variant, arch = rest.rsplit(" sm_", 1)
            if kernel not in known:
                fields = {"kernel": kernel, "variant": variant, "arch": int(arch)}
                records.append({**fields, "triton": triton, **row})
    return records


def _kernel_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["arch"], row["triton"]), []).append(row)
    return [
        [kernel, f"sm_{arch}", triton, str(len(found)), *_cells(found)]
        for (kernel, arch, triton), found in sorted(groups.items())
    ]


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    compiled = [r for r in rows if "regs" in r]
    notes = ", ".join(sorted({r["note"] for r in rows if r.get("note")}))
    if not compiled:
        return ["", "", "", "", notes]
    maxima = [str(max(r[k] for r in compiled)) for k in ("regs", "stack", "shared")]
    return [*maxima, ", ".join(sorted({r["mma"] for r in compiled if r["mma"]})), notes]


def _check(args: argparse.Namespace) -> int:
    found = aot.check(args.sample or 12, jobs=args.jobs or 1)
    failed = bool(found.stale or found.problems)
    if args.json:
        print_json("kernels", **found._asdict())
        return int(failed)
    for key, why in {**found.stale, **found.problems}.items():
        print(f"{why}: {key}")
    print(
        f"{found.rows} rows, {len(found.stale)} stale, {found.compiled} compiled, "
        f"{len(found.problems)} with a problem"
    )
    if found.stale:
        print("`make aot` compiles the stale rows and writes the table.")
    return int(failed)


def _rebuild(args: argparse.Namespace) -> int:
    failed, total = {}, 0
    for number, total, row, problem in aot.refresh(args.all, args.jobs or 1):
        if problem:
            failed[row.key] = problem
        if not args.json and (problem or number % 100 == 0):
            print(f"[{number}/{total}] {row.key}: {problem or 'ok'}", flush=True)
    if args.json:
        print_json("kernels", compiled=total, problems=failed)
    else:
        print(f"{total} rows compiled, {len(failed)} with a problem")
    return int(bool(failed))
