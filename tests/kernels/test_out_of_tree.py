"""Kernels of other packages: `kernel_op`, `launch` and `Space` from outside, in the package's own op namespace."""

import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import fuseops as fo
from fuseops.errors import FuseOpsError
from fuseops.kernels import configs, kernel_op, launch, registry

pytest.importorskip("triton")
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_kernel.py"


@pytest.fixture
def apart(monkeypatch):
    """What is registered in here is not there for other tests."""
    monkeypatch.setattr(registry, "KERNEL_OPS", dict(registry.KERNEL_OPS))
    monkeypatch.setattr(configs, "SPACES", dict(configs.SPACES))


@pytest.mark.usefixtures("interpreted", "apart")
def test_the_example_launches_its_own_kernels(monkeypatch):
    with registry.watch_launches() as launched:
        found = runpy.run_path(str(EXAMPLE), run_name="their_package.kernels")
    theirs = {op.label for op, *_ in launched if not op.label.startswith("fuseops::")}
    assert theirs == {
        "their_package::softcap_fwd", "their_package::softcap_bwd",
    }  # fmt: skip
    assert torch.ops.their_package.softcap_fwd.default is found["softcap_fwd"].op
    assert {"their_package::softcap_fwd", "their_package::softcap_bwd"} <= set(registry.KERNEL_OPS)
    assert not hasattr(torch.ops.fuseops, "softcap_fwd")
    x = torch.randn(5, 3)
    # torch.compile finds the module of what it traces by name, which runpy forgets
    theirs = types.ModuleType("their_package.kernels")
    vars(theirs).update(found)
    monkeypatch.setitem(sys.modules, "their_package", types.ModuleType("their_package"))
    monkeypatch.setitem(sys.modules, "their_package.kernels", theirs)
    model = fo.Sequential(fo.ops.Linear(3, 8), found["SoftCap"](3.0))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    # bf16 is rounded as the hardware does: the interpreter is repaired for kernels from elsewhere, too
    given = 30 * torch.randn(50, 7).bfloat16()
    same = found["softcap_fwd"](given, 3.0) == found["softcap_fwd_twin"](given, 3.0)
    assert same.float().mean() > 0.95
    with pytest.raises(FuseOpsError, match=r"no value for BLOCK\. Pass every argument by position"):
        launch(found["softcap_fwd_kernel"], (1,), x, x, x.numel(), 3.0)


@pytest.mark.usefixtures("apart")
def test_a_namespace_is_the_package_or_what_is_asked_for():
    def twin(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def named(name, module, **options):
        def launcher(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        launcher.__name__, launcher.__module__ = name, module
        return kernel_op(twin=twin, **options)(launcher)

    assert named("plus_one", "mine.inner.kernels").label == "mine::plus_one"
    assert named("plus_one", "__main__").label == "main::plus_one"
    assert named("plus_one", "mine", namespace="other").label == "other::plus_one"
    own = named("plus_one_of_ours", "fuseops.kernels.anything")
    assert own.label == "fuseops::plus_one_of_ours" and "plus_one_of_ours" in registry.KERNEL_OPS
    with pytest.raises(FuseOpsError, match=r"'mine::plus_one' is registered twice.*another name"):
        named("plus_one", "mine.elsewhere")
    assert torch.equal(torch.ops.mine.plus_one(torch.ones(2)), torch.full((2,), 2.0))
    assert "plus_one" not in dir(fo.kernels)
