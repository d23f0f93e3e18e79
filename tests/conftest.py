"""What every test stands on: Hypothesis profiles, seeds, poisoned memory, skips."""

import os

# Before torch and numpy read them, and for every process that a test starts: one thread each. More only spin where
# another process works: a test took 10 times its processor time on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import gc
import random
import shutil
import sys
import sysconfig
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch._dynamo.trace_rules
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _len_torch_dispatch_stack

# Of a kind of device that is not there torch keeps each seed, with the text of the stack that set it: that took most of
# the time of laws over draws.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        vars(kind)["manual_seed_all"] = lambda seed: None


class TorchRandom:
    """Lets Hypothesis seed torch before each example, so that a failing one can be replayed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # Hypothesis holds only a weak reference
hypothesis.register_random(torch_random)

# No deadline, and no check of how fast examples are drawn: the first example of a test pays for compilation and
# caches, and a busy machine breaks no law.
hypothesis.settings.register_profile(
    "dev",
    max_examples=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
dev = hypothesis.settings.get_profile("dev")
hypothesis.settings.register_profile("ci", dev, max_examples=100, derandomize=True)
hypothesis.settings.register_profile("nightly", dev, max_examples=1000)
in_ci = os.environ.get("CI", "").lower() == "true"
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if in_ci else "dev"))


STARTED = pytest.StashKey[float]()


def missing_for(mark: str) -> str | None:
    """Why tests with this mark cannot run here, or None."""
    if mark == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none"
    if mark == "cxx":
        if not any(map(shutil.which, [os.environ.get("CXX", "g++"), "clang++"])):
            return "needs a C++ compiler, and there is none on PATH"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "needs Python.h, and this Python came without it (python3-dev)"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="start no test later than this; each function comes first with one of its cells, in a drawn order",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin("xdist"):
        config.option.testrunuid = config.option.testrunuid or uuid.uuid4().hex


def pytest_report_header(config: pytest.Config) -> str | None:
    drawn_by = config.getoption("testrunuid", None)  # an option of xdist, which may not be there
    if config.option.minutes is None or drawn_by is None:
        return None
    return f"order drawn by: --minutes {config.option.minutes} --testrunuid {drawn_by}"


def by_turns(items: list[pytest.Item], chance: random.Random, workers: int) -> list[pytest.Item]:
    """One drawn cell of every function, then the others: file by file, which are drawn too, as fixtures of a file cost.

    Each of `workers` processes begins with an equal part of the list, in which the same holds.
    """
    drawn = chance.sample(items, len(items))
    first = {item.nodeid.partition("[")[0]: item for item in drawn}
    place = {path: k for k, path in enumerate(dict.fromkeys(item.path for item in drawn))}
    others = set(drawn) - set(first.values())
    order = sorted(drawn, key=lambda item: (item in others, place[item.path]))
    return [item for worker in range(workers) for item in order[worker::workers]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ("gpu", "cxx"):
        if reason := missing_for(mark):
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=reason))
    if config.option.minutes is not None:
        chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
        items[:] = by_turns(items, chance, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - item.config.stash[STARTED] > 60 * minutes:
        pytest.skip("another run's turn: the minutes of this one are over, and CI=true takes all")


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector looks at what tests make alone, a tenth of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, alone or in a full run."""
    value = 0
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """What a test sets for the process ends with it: the token of settings is valid while their layer lives."""
    from fuseops.ops import scopes  # not before a test asks for Triton's interpreter

    layer, token = scopes.process.layer, scopes.process.token
    yield
    scopes.process.layer, scopes.process.token = layer, token


def poison(t: torch.Tensor) -> None:
    """Fills `t` with what no test survives: NaN, or the largest integer as an index or offset."""
    with torch.no_grad():
        if t.dtype is torch.float4_e2m1fn_x2:
            pass  # has no NaN, and torch cannot fill it
        elif t.dtype.is_floating_point or t.dtype.is_complex:
            t.fill_(float("nan"))
        elif t.dtype is torch.bool:
            t.fill_(True)
        else:
            t.fill_(torch.iinfo(t.dtype).max)


def poisoning(
    original: Callable[..., Any], traced: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`original`, with its result poisoned when code of the package called it.

    Real memory only: under a dispatch mode (fake tensors, counters of ops) and for tensors without
    plain storage (meta, subclasses) the result stays as it is, and dynamo traces `traced`.
    """
    traced = traced or original

    def allocate(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        t = original(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        by_package = caller.partition(".")[0] == "fuseops"
        plain = type(t) is torch.Tensor and t.device.type != "meta"
        if by_package and plain and _len_torch_dispatch_stack() == 0:
            poison(t)
        return t

    return allocate


def traced_new_empty(t: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
    # Dynamo knows `new_empty` as a method by name, not as the function that was behind it.
    if size and not isinstance(size[0], tuple | list):
        size = (size,)
    return torch.ops.aten.new_empty(t, *size, **options)


# Made once: dynamo guards on the identity of a function that it traced.
POISONED = [
    (torch, "empty", poisoning(torch.empty)),
    (torch, "empty_like", poisoning(torch.empty_like)),
    (torch, "empty_strided", poisoning(torch.empty_strided)),
    (torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty, traced_new_empty)),
    (
        torch.Tensor,
        "new_empty_strided",
        poisoning(torch.Tensor.new_empty_strided, torch.ops.aten.new_empty_strided),
    ),
]


def collect_functions_of_torch() -> None:
    """Dynamo and the device context collect torch's functions by identity and keep them. Collected
    while a test has torch.empty replaced, they would miss the real one; `init_process_group` makes
    dynamo collect again.
    """
    _device_constructors()
    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map
    if torch.empty not in rules():
        rules.cache_clear()
        rules()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uninitialised memory that package code allocates reads as NaN, not as lucky zeros.

    `@pytest.mark.uninitialized` leaves torch alone, for a test that measures or inspects it.
    """
    collect_functions_of_torch()
    if request.node.get_closest_marker("uninitialized"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in POISONED:
            patch.setattr(owner, name, replacement)
        yield


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    """`with no_synchronisation():` raises at any host synchronisation with the CUDA device inside."""

    @contextmanager
    def scope() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return scope
