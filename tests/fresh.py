"""Python that has imported torch and nothing else: one process, of which every run is a fork, since torch takes
seconds to import.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

_server: subprocess.Popen[str] | None = None


def run(
    *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, strict: bool = False
) -> subprocess.CompletedProcess[str]:
    """As `python FILE args`, `python -c CODE args` or `python -m MODULE args`, and with -W error where it is strict."""
    global _server
    if _server is None or _server.poll() is not None:
        command = [sys.executable, "-W", "ignore", __file__]
        _server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_server.kill)
    assert _server.stdin is not None and _server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "argv": argv,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "strict": strict,
            "said": folder,
        }
        print(json.dumps(given), file=_server.stdin, flush=True)
        code = int(_server.stdout.readline())
        out, error = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "error"))
    return subprocess.CompletedProcess(argv, code, out, error)


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = _run(**json.loads(line))
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(argv: list[str], env: dict[str, str], cwd: str, strict: bool, said: str) -> int:
    """The exit status, as the interpreter has it at the end of a script."""
    for stream, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(Path(said, name), os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    first = str(Path(argv[0]).parent) if not argv[0].startswith("-") else cwd
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    warnings.resetwarnings()
    warnings.simplefilter("error" if strict else "default")
    try:
        _start(*argv)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _start(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve()
