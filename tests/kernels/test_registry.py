"""What one registration gives: schema, fake, compile, bypass, names in the profiler, imports
without Triton.
"""

import subprocess
import sys

import pytest
import torch
from samples import samples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuseops.errors import FuseOpsError
from fuseops.kernels.registry import KERNEL_OPS, kernel_op, tensor_bytes

SAMPLES = samples()


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(KERNEL_OPS)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_opcheck(name):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    torch.library.opcheck(KERNEL_OPS[name].op, SAMPLES[name], test_utils=tests)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_compiles_whole_and_equals_eager(name):
    torch.compiler.reset()
    op = KERNEL_OPS[name]
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
    for got, want in zip(
        tree_leaves(compiled(*SAMPLES[name])), tree_leaves(op(*SAMPLES[name])), strict=True
    ):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_cases_run_on_meta_and_count_bytes(name):
    op = KERNEL_OPS[name]
    for args in op.cases():
        assert op.nbytes(*args) >= tensor_bytes(args)
        break
    else:
        raise AssertionError(f"{name} has no cases for the ahead-of-time table")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_op():
    x = torch.ones(2, 3)
    with Seen() as seen:
        KERNEL_OPS["bias_bwd"](x)
    assert seen.names == ["fuseops.bias_bwd.default"]


def test_functorch_and_subclasses_reach_the_dispatcher(monkeypatch):
    op = KERNEL_OPS["bias_bwd"]
    calls = []
    monkeypatch.setattr(op, "body", lambda *args: calls.append("bypassed"))
    assert op(torch.ones(2, 3)) is None and calls == ["bypassed"]

    class Mine(torch.Tensor):
        pass

    parameter = torch.nn.Parameter(torch.ones(2, 3))
    for x in (torch.ones(2, 3).as_subclass(Mine), parameter):
        assert torch.equal(op(x).detach().as_subclass(torch.Tensor), torch.full((3,), 2.0))
    with torch.no_grad():
        assert op(parameter) is None
    assert len(calls) == 2
    assert torch.equal(torch.func.vmap(op)(torch.ones(4, 2, 3)), torch.full((4, 3), 2.0))
    assert len(calls) == 2


def test_profiler_shows_the_name():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        KERNEL_OPS["bias_bwd"](torch.ones(2, 3))
    assert "fuseops::bias_bwd" in {e.key for e in p.key_averages()}


def test_names_are_unique():
    def bias_bwd(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(FuseOpsError, match="registered twice"):
        kernel_op(twin=bias_bwd)(bias_bwd)


WITHOUT_TRITON = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'triton': raise ImportError('no triton here')
sys.meta_path.insert(0, Block())
import torch, fuseops.kernels.all as k
y = k.activation.act_fwd(torch.ones(2, 8), 'swiglu')
assert y.shape == (2, 4) and 'triton' not in sys.modules
"""


def test_runs_without_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_errors_name_what_was_given():
    op = KERNEL_OPS["bias_fwd"]
    with pytest.raises(FuseOpsError, match=r"bias is \(4,\), expected \(3,\)"):
        op.launcher(torch.ones(2, 3), torch.ones(4))
