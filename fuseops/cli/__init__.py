"""The command line: explain a model, measure it, tune its kernels, plan its memory, describe this
machine, run the demo.

Every command has `--json`, which prints one object with a `schema_version`. Exit codes: 0 all is
well, 1 a check or the user's model failed, 2 the command was called wrongly.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from fuseops.errors import FuseOpsError

from . import bench, demo, env, explain, kernels, offload_plan, tune
from .env import version
from .target import UsageError, user_error_in, user_traceback

OK, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.   -> exit code"""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough; exit must not write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except UsageError as error:
        print(f"fuseops {args.command}: {error}", file=sys.stderr)
        return USAGE
    except FuseOpsError as error:
        notes = [f"\n  {note}" for note in getattr(error, "__notes__", ())]
        print(
            f"fuseops {args.command}: {type(error).__name__}: {error}{''.join(notes)}",
            file=sys.stderr,
        )
        return FAILED
    except Exception as error:
        target = getattr(args, "target", None)
        user_error = None if target is None else user_error_in(error)
        if user_error is None:
            raise
        if user_error is error:  # not one of the file itself
            where = f"the model of {target} failed on the inputs of its build()"
            print(f"fuseops {args.command}: {where}:", file=sys.stderr)
        print(user_traceback(user_error), end="", file=sys.stderr)
        return FAILED
    return int(code)


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a command.  What is unknown is an error of that command, with its usage."""
    parser, commands = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(USAGE)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """-> the parser, and that of every command"""
    parser = argparse.ArgumentParser(
        prog="fuseops", description="Compose a model from small ops; see what was fused."
    )
    parser.add_argument("--version", action="version", version=f"fuseops {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in (
        (
            "explain",
            explain,
            "what a model fuses, what it does not and why, and what it saves for the backward",
        ),
        ("bench", bench, "time a training step: fused, unfused, and as plain torch"),
        ("tune", tune, "time the kernels that a model launches on this GPU and keep the fastest"),
        (
            "kernels",
            kernels,
            "registers, spills and shared memory of every kernel, compiled ahead of time",
        ),
        (
            "offload-plan",
            offload_plan,
            "what to keep on the device, to move to the host and to recompute, and what it costs",
        ),
        ("env", env, "versions, devices, settings, and which backends can run here"),
        ("demo", demo, "train a small mixture-of-experts model, check it, and write a report"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print as JSON")
        command.set_defaults(run=module.run)
    return parser, commands.choices
