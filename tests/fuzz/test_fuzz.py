"""A few programs of every kind, and that a wrong result is found and can be run again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import KINDS, ON_GPU, failure, program
from torch import Tensor

import fuseops as fo
from fuseops.offload.lanes import arena


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
def test_programs(kind: str, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "REGION", 1 << 14)
        assert not (told := failure((kind, seed))), told


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
@given(seed=st.integers(0, 2**32))
def test_programs_on_a_gpu(kind: str, seed: int) -> None:
    assert not (told := failure((kind, seed))), told


def test_a_program_is_that_of_its_seed() -> None:
    for kind in KINDS:
        assert program(kind, 3) == program(kind, 3) != program(kind, 4)


@pytest.mark.parametrize(("kind", "error"), [("chain", 1e-6), ("rounded", 0.1)])
def test_a_wrong_gradient_is_found_and_runs_again(
    kind: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fo.ops.Linear.bwd

    def wrong(self: fo.ops.Linear, saved: Any, dy: Tensor, **more: Any) -> fo.Grads:
        grads = right(self, saved, dy, **more)
        return grads._replace(x=None if grads.x is None else grads.x * (1 + error))

    monkeypatch.setattr(fo.ops.Linear, "bwd", wrong)
    told = next(filter(None, (failure((kind, seed)) for seed in range(99))))
    head, _, script = told.partition("\n\n")
    assert f"python tests/fuzz --kind {kind} --seed" in head and "gradient of" in script
    script = script.partition("\nTraceback")[0]
    with pytest.raises(AssertionError, match="gradient of"):
        exec(script, {})
    monkeypatch.undo()
    exec(script, {})
