"""A `Space` picks the block sizes and warps that a kernel is launched with.

A ``Space`` names the configurations a kernel may be launched with and a default among them.
``space.pick`` looks, in this order, in the user's cache file (written by ``tune``), in the table
shipped with the package, and takes the default otherwise. Both are keyed by kernel, architecture,
dtype, weight dimensions and a bucket of rows, never by the raw row count, so a new token count
neither compiles nor tunes anything. Nothing is ever timed inside ``pick``.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import torch

from fuseops.arguments import instance_of, several
from fuseops.attributes import attributes_set
from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import current_arch
from fuseops.kernels.replay import forget_replays, separate_replays
from fuseops.words import dtype_name

Config = dict[str, int]
SCHEMA_VERSION = 1
SHIPPED = Path(__file__).with_name("configs.json")
MAX_BUCKET = 1 << 18

SPACES: dict[str, Space] = {}
Requests = list[tuple["Space", tuple[Any, ...]]]  # for configurations: (space, key)


class Space:
    """A `Space` holds the configurations of one kernel.

    ``candidates`` are those for all weight dimensions, or a function ``(dims, itemsize)`` that lists those for given
    ones; ``default(rows, dims, itemsize)`` is one of them, the first if not given. Both are pure functions of sizes.
    ``dims`` names the dimensions, in the order in which they are given and stand in a table's keys.
    """

    requests: ClassVar[Requests | None] = None  # of all spaces, while they are recorded

    def __init__(
        self,
        name: str,
        candidates: Callable[..., Iterable[Config]] | Sequence[Config],
        default: Callable[..., Config] | None = None,
        dims: tuple[str, ...] = ("columns",),
    ) -> None:
        instance_of(name, str, "Space(name, ...)", "a name, a string")
        if name in SPACES:
            raise FuseOpsError(f"configuration space '{name}' is declared twice")
        where = f"configuration space '{name}':"
        if not callable(candidates):
            expected = "configurations, each a dict, or a function that lists them"
            candidates = several(candidates, dict, f"{where} candidates", expected)
            if not candidates:
                raise FuseOpsError(
                    f"configuration space {name!r} has no candidates, expected one or more."
                )
        expected = "a function of (rows, dims, itemsize), or None"
        instance_of(default, (Callable, NoneType), f"{where} default", expected)
        dims = several(dims, str, f"{where} dims", "the names of dimensions, in a tuple")
        self.name = name
        self._candidates = candidates if callable(candidates) else lambda dims, itemsize: candidates
        self.default = default or (lambda rows, dims, itemsize: self.candidates(dims, itemsize)[0])
        self.dims = dims
        self.forced: Config | None = None
        self._memo: dict[tuple[Any, ...], Config] = {}
        SPACES[name] = self

    def candidates(self, dims: tuple[int, ...], itemsize: int) -> list[Config]:
        """All configurations that can be chosen for these dimensions, each once."""
        distinct = {tuple(config.items()): config for config in self._candidates(dims, itemsize)}
        if not distinct:
            raise FuseOpsError(f"space '{self.name}' has no candidates for {self.dims} of {dims}")
        return list(distinct.values())

    def pick(self, rows: int, dims: tuple[int, ...], like: torch.Tensor) -> Config:
        """The configuration for this many rows of tensors shaped and typed like ``like``."""
        key = (current_arch(like.device), like.dtype, dims, bucket(rows))
        if Space.requests is not None and (self, key) not in Space.requests:
            Space.requests.append((self, key))
        if self.forced is not None:
            return self.forced
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._look_up(key, like.dtype.itemsize)
        return found

    def _look_up(self, key: tuple[Any, ...], itemsize: int) -> Config:
        _, _, dims, rows = key
        if len(dims) != len(self.dims):
            raise FuseOpsError(f"space '{self.name}' picks by {self.dims}, not by {dims}")
        allowed = self.candidates(dims, itemsize)
        for table in (cached_table(), shipped_table()):
            entry = table.get(entry_key(self.name, *key))
            if entry in allowed:
                return entry
        return self.default(rows, dims, itemsize)


class Switch(Space):
    """A `Switch` is a space of two configurations, {option: 0} and {option: 1}: off and on.

    ``default(rows, dims)`` decides where no table has an entry.
    """

    def __init__(
        self,
        name: str,
        option: str,
        default: Callable[[int, tuple[int, ...]], bool],
        dims: tuple[str, ...] = ("n", "k"),
    ) -> None:
        self.option = option
        off_on = [{option: 0}, {option: 1}]
        super().__init__(
            name, off_on, lambda rows, dims, itemsize: off_on[bool(default(rows, dims))], dims
        )

    def enabled(self, rows: int, dims: tuple[int, ...], like: torch.Tensor) -> bool:
        """Whether the option is on; arguments as of `pick`."""
        return bool(self.pick(rows, dims, like)[self.option])


def bucket(rows: int) -> int:
    """Rows rounded up to a power of two, at most 2^18."""
    return 0 if rows <= 0 else min(1 << (rows - 1).bit_length(), MAX_BUCKET)


def entry_key(name: str, arch: int, dtype: torch.dtype, dims: tuple[int, ...], rows: int) -> str:
    """The key of a table entry, readable in the file: ``glu_fwd/sm90/bfloat16/4096/r8192``."""
    return f"{name}/sm{arch}/{dtype_name(dtype)}/{'x'.join(map(str, dims))}/r{rows}"


@functools.cache
def shipped_table() -> dict[str, Config]:
    """The table that comes with the package."""
    return _entries(SHIPPED)


@functools.cache
def cached_table() -> dict[str, Config]:
    """The table that ``tune`` wrote on this machine with these versions."""
    return _entries(cache_file())


def cache_file() -> Path:
    """One file for each pair of versions, under ``FUSEOPS_CACHE_DIR`` or ``~/.cache/fuseops``."""
    root = os.environ.get("FUSEOPS_CACHE_DIR") or Path.home() / ".cache" / "fuseops"
    return Path(root) / f"configs-triton{versions()['triton']}-torch{versions()['torch']}.json"


@functools.cache
def versions() -> dict[str, str]:
    """The versions that a tuned configuration belongs to."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"triton": triton, "torch": torch.__version__.replace("+", "-")}


def triton_release() -> str:
    """The first two numbers of the Triton that is installed, "none" where none is."""
    return ".".join(versions()["triton"].split(".")[:2])


def store(entries: dict[str, Config]) -> Path:
    """Add entries to the cache file, which is replaced under a lock: several processes may do so at once."""
    import fcntl  # POSIX only: where it is missing, kernels run with the shipped table

    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = {**_entries(path), **entries}
        document = {"schema_version": SCHEMA_VERSION, "versions": versions(), "entries": merged}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            json.dump(document, new, indent=1, sort_keys=True)
        Path(new.name).replace(path)
    reload_tables()
    return path


def reload_tables() -> None:
    """Drop the tables in memory, so that the next pick reads the files again."""
    cached_table.cache_clear()
    shipped_table.cache_clear()
    forget_replays()
    for space in SPACES.values():
        space._memo.clear()


# more than any L2: written between two calls to evict their data
CACHE_BYTES = 1 << 28


def time_us(call: Callable[[], Any], rounds: int = 20) -> float:
    """Median microseconds of one call by CUDA events, with a cold L2. Raises FuseOpsError without a GPU."""
    if not torch.cuda.is_available():
        raise FuseOpsError("timing kernels needs a CUDA device, and torch sees none.")
    cache = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    call()
    events = []
    for _ in range(rounds):
        cache.zero_()  # also keeps the GPU busy while the host queues the call
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3


def tune(
    call: Callable[[], Any],
    time_us: Callable[[Callable[[], Any]], float] = time_us,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Config]:
    """Time every configuration of every kernel that ``call()`` launches and store the fastest.

    ``time_us(call)`` measures one call; ``progress(what, done, total)`` is told after each.
    """
    with record_requests() as asked:
        call()
    work = [
        (space, ask, config)
        for space, ask in asked
        for config in space.candidates(ask[2], ask[1].itemsize)
    ]
    timed: dict[str, list[tuple[float, int, Config]]] = {}
    for number, (space, ask, config) in enumerate(work):
        key = entry_key(space.name, *ask)
        with forced(space, config):
            timed.setdefault(key, []).append((time_us(call), number, config))
        if progress:
            progress(key, number + 1, len(work))
    entries = {key: min(times)[2] for key, times in timed.items()}
    store(entries)
    return entries


@contextmanager
def forced(space: Space, config: Config) -> Iterator[None]:
    """Inside, the space always picks this configuration (for tuning and tests)."""
    key = (space.name, *config.items())
    with attributes_set([(space, "forced", config)]), separate_replays(key):
        yield


@contextmanager
def record_requests() -> Iterator[Requests]:
    """Inside, requests for configurations are collected as (space, key), in order, each once."""
    requests: Requests = []
    with attributes_set([(Space, "requests", requests)]), separate_replays():
        yield requests


def _entries(path: Path) -> dict[str, Config]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FuseOpsError(
            f"cannot read the configuration table {path}: {error}. Delete it; `fuseops tune` makes a new one."
        ) from error
    return document["entries"] if document.get("schema_version") == SCHEMA_VERSION else {}
