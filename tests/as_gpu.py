"""The Python of steps as an H200's host runs it, on a CPU: its decisions and its launchers, and launches of nothing.

    python tests/as_gpu.py
    python tests/as_gpu.py compiled

prints, of a repeated step under each recipe, the Python functions that are called, and the kernel ops whose launchers
run anew, since nothing replays them; of a compiled step, and of the same model's in plain torch, the calls, the kernels
of the compiler, and the ops that the dispatcher is asked for besides. The models are those of `benchmarks/host.py`.
What is computed is nonsense. A process of its own: what it replaces stays so.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from counted import calls_in
from torch import Tensor, nn

import fuseops as fo
from fuseops import torch_private
from fuseops.kernels import fp8_paths, registry, replay
from fuseops.ops import splits
from fuseops.plan import segment

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import host

STEPS: dict[str, Callable[[], host.Step]] = {
    "mlp": partial(host.mlp, "cpu", rows=64, width=512, hidden=1536),
    "linears": partial(host.linears, "cpu"),
    "moe": partial(host.moe, "cpu"),
}
launch: Any = importlib.import_module("fuseops.kernels.launch")  # not the function of this name
anew: Counter[str] = Counter()  # launchers that ran, by name of the op
RECIPES = {
    "bf16": None,
    "block": fo.recipes.Float8BlockScaling(),
    "block_kept": fo.recipes.Float8BlockScaling(weights="step"),
    "current": fo.recipes.Float8CurrentScaling(),
    "delayed": fo.recipes.DelayedScaling(),
}


class Nothing:
    """What launches a compiled kernel again: it launches nothing."""

    head = ()
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=()))

    def __init__(self, compiled: Any, constants: Any) -> None:
        self.constants = constants

    def stream_of(self, index: int) -> int:
        return 0

    def encode_descriptor(self, descriptor: Any, number: int) -> list[int]:
        return [0]

    def raw(self, *args: Any) -> None:
        return None


@functools.cache
class Kernel:
    """A kernel whose launch is nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel


def everywhere(name: str, old: Any, new: Any) -> None:
    """Replace a function in all modules of the package that have imported it."""
    for module in [*sys.modules.values()]:
        ours = isinstance(module, ModuleType) and module.__name__.startswith("fuseops")
        if ours and getattr(module, name, None) is old:
            setattr(module, name, new)


def mm_unrounded(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def note_launchers() -> None:
    """Have launchers that run noted: those that nothing replays yet, and those that nothing can."""
    note, make = replay.Replays.record, replay.Replay.__init__

    def noted(self: replay.Replays, op: Any, args: tuple[Any, ...]) -> None:
        anew[op.name] += 1
        note(self, op, args)

    def made(self: replay.Replay, launcher: Any, *rest: Any) -> None:
        def run(*args: Any) -> Any:
            anew[launcher.__name__] += 1
            return launcher(*args)

        make(self, launcher, *rest)
        self.launcher = run  # of what cannot be replayed, which transcripts call too

    replay.Replays.record, replay.Replay.__init__ = noted, made  # type: ignore[method-assign]


def compared(a: Tensor, b: Any) -> Tensor:
    raise TypeError(f"a step compares a tensor with {b!r:.80}, which takes 20 us")


def pretend() -> torch.library.Library:
    """Tensors of the CPU say that they lie on an H200, and its launches end at `Nothing`."""
    torch.Tensor.is_cuda = property(lambda t: t.device.type == "cpu")  # type: ignore[assignment, method-assign]
    facts: dict[str, Any] = {
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=132, name="", gcnArchName=""
        ),
        "current_device": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in facts.items():
        setattr(torch.cuda, name, answer)
    torch_private.current_device = lambda: -1
    torch_private.current_stream = lambda index: (0,)
    torch_private.is_capturing = lambda: False
    segment.INTERPRET, launch.NUM_SMS_INTERPRETED = True, 132
    launch.enter_context = lambda: None
    launch.launcher_of = Nothing
    note_launchers()
    torch.Tensor.__eq__ = compared  # type: ignore[assignment, method-assign]
    # a GPU gives addresses that it gave before, of which a map is kept; a CPU gives others
    replay.TensorMapCache.__missing__ = staticmethod(int)  # type: ignore[assignment]
    run = launch._run
    launch._run = lambda kernel, *rest: run(Kernel(kernel), *rest)
    everywhere("multiplies_codes", fp8_paths.multiplies_codes, lambda device: True)
    everywhere("check_splits", splits.check_splits, lambda *args: None)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", mm_unrounded, "CPU")  # a build for CPUs has none
    return library


def noting(names: list[str], op: registry.KernelOp[..., Any]) -> Callable[..., Any]:
    """What asks the dispatcher for an op, and notes its name."""
    ask = op._torch_dispatcher

    def noted(*args: Any, **kwargs: Any) -> Any:
        names.append(op.name)
        return ask(*args, **kwargs)

    return noted


def compiling() -> list[str]:
    """Have the kernels of the compiler launch nothing, and what compiled code launches besides noted: their names."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    config.force_disable_caches = True  # which ask for more of a device
    launched: list[str] = []
    AsyncCompile.cpp_pybinding = lambda *_, **__: lambda *_: launched.append("its own")  # type: ignore[method-assign]
    for op in registry.KERNEL_OPS.values():
        op._torch_dispatcher = noting(launched, op)  # type: ignore[method-assign]
    return launched


def compiled(model: nn.Module, x: Tensor, launched: list[str]) -> dict[str, Any]:
    """Of a compiled step: calls, launches of the compiler's own kernels, ops that went through the dispatcher."""
    step = step_of(torch.compile(model, dynamic=False), [x, *model.parameters()])
    with torch.autograd.set_multithreading_enabled(False), replay.separate_replays():
        for _ in range(5):
            step()
        launched.clear()
        step()
        found = dict(Counter(launched))
        return {"calls": min(calls_in(step) for _ in range(3)), "launched": found}


def counted(make: Callable[[], host.Step], recipe: Any) -> dict[str, Any]:
    ours, _, x = make()
    step = step_of(ours, [x, *ours.parameters()], recipe)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            step()
        anew.clear()
        step()
        found = dict(anew)
        calls = min(calls_in(step) for _ in range(3)) - sum(found.values())  # those that note
        return {"calls": calls, "anew": found}


def step_of(model: Any, leaves: list[Tensor], recipe: Any = None) -> Callable[[], None]:
    """Forward and backward of a model over the first of the leaves."""

    def step() -> None:
        with nullcontext() if recipe is None else fo.recipe(recipe, strict=True):
            y = model(leaves[0])
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return step


def all_compiled() -> dict[str, Any]:
    launched, found = compiling(), {}
    for name, make in STEPS.items():
        ours, _, x = make()
        # a CPU takes seconds for a grouped GEMM, and counts are those of any size
        _, plain, few = host.moe("cpu", 64, 32, 4) if name == "moe" else make()
        found[name] = {
            "fuseops": compiled(ours, x, launched),
            "plain": compiled(plain, few, launched),
        }
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    library = pretend()
    found = (
        all_compiled()
        if sys.argv[1:] == ["compiled"]
        else {f"{n} {name}": counted(m, r) for n, m in STEPS.items() for name, r in RECIPES.items()}
    )
    print(json.dumps(found, indent=1))
