"""Bad ends of groups: an error that names the op and the group, at once where no device has to be waited for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.errors import ShapeError
from fuseops.kernels.groups import bad_ends, group_starts
from fuseops.ops import scopes
from fuseops.run import debug

E, D, F, ROWS = 4, 6, 4, 9


def experts(**options: Any) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, **options),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, **options),
        }
    )


def call(model: Any, ends: Any, device: str = "cpu") -> Tensor:
    offs = torch.as_tensor(ends, dtype=torch.int32, device=device)
    y: Tensor = model(
        torch.randn(ROWS, D, device=device), offs=offs, probs=torch.ones(ROWS, device=device)
    )
    return y


BAD = [
    ([-1, 2, 3, 9], r"group 0 ends at row -1, which is negative"),
    ([3, 2, 3, 9], r"group 1 ends at row 2, before it begins \(3\)"),
    ([3, 3, 7, 10], r"group 3 ends at row 10, but x has 9 rows"),
    ([20, 3, 7, 9], r"group 0 ends at row 20, but x has 9 rows"),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("ends", "said"), BAD)
def test_on_the_cpu_bad_ends_are_refused_at_once(ends: list[int], said: str, fused: bool) -> None:
    model = fo.Sequential({"experts": experts(bias=False)})
    with fo.fusion(fused), pytest.raises(ShapeError, match=said) as caught:
        call(model, ends)
    assert any("fc1" in note and "GroupedLinear" in note for note in caught.value.__notes__)


@given(st.lists(st.integers(-2, ROWS + 2), min_size=E, max_size=E))
def test_exactly_the_bad_ends_are_refused(ends: list[int]) -> None:
    edges = [0, *ends, ROWS]
    good = edges == sorted(edges)
    offs = torch.tensor(ends, dtype=torch.int32)
    assert bool(bad_ends(offs, ROWS).any()) is not good
    assert group_starts(offs).tolist() == [0, *ends[:-1]]
    if good:
        call(experts(), ends)
    else:
        with pytest.raises(ShapeError):
            call(experts(), ends)


@pytest.mark.parametrize(
    ("offs", "said"),
    [
        (
            torch.zeros(E + 1, dtype=torch.int32),
            r"int32 of shape \(4,\).* got torch.int32 .* \(5,\)",
        ),
        (torch.zeros(E, dtype=torch.int64), r"got torch.int64"),
    ],
)
def test_what_shows_without_values_is_refused_everywhere(offs: Tensor, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        experts()(torch.randn(ROWS, D), offs=offs, probs=torch.ones(ROWS))


@pytest.mark.parametrize(("fused", "ops"), [(False, ["fc1", "fc2"]), (True, ["fc1..fc2"] * 2)])
def test_a_check_on_a_device_knows_which_op_runs(
    fused: bool, ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    class Seen:
        def splits(self, offs: Tensor, rows: int) -> None:
            seen.append((debug.running_op(), rows))

    model = torch.nn.ModuleDict({"moe": experts(device="meta")})
    fo.configure(model)  # absolute names
    monkeypatch.setattr(scopes.current(), "debug", Seen())
    with fo.fusion(fused):
        call(model["moe"], [1, 2, 3, 4], "meta")
    assert [rows for _, rows in seen] == [ROWS, ROWS]
    assert [where.split("'")[1] for where, _ in seen] == [f"moe.{op}" for op in ops]


def test_compiled_code_asserts_inside_the_scope_only() -> None:
    torch.compiler.reset()
    model = experts()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = call(model, [1, 2, 3, 9])
    torch.manual_seed(0)
    with fo.debug():
        assert call(compiled, [1, 2, 3, 9]).shape == expected.shape
        with pytest.raises(RuntimeError, match="offs must not fall"):
            call(compiled, [3, 2, 3, 9])


def test_the_scope_ends_and_nests() -> None:
    with fo.debug():
        mine = scopes.current().debug
        with fo.debug():
            assert scopes.current().debug is mine is not None
        assert scopes.current().debug is mine
    assert scopes.current().debug is None
    with pytest.raises(ZeroDivisionError), fo.debug():
        raise ZeroDivisionError
    assert scopes.current().debug is None


# --- on a device


@pytest.mark.gpu
@pytest.mark.parametrize(("ends", "said"), BAD[1:3])
@pytest.mark.parametrize("fused", [False, True])
def test_a_device_reports_the_op_and_the_group(fused: bool, ends: list[int], said: str) -> None:
    model = torch.nn.ModuleDict({"moe": experts(device="cuda", bias=False)})
    fo.configure(model)
    with pytest.raises(ShapeError, match=rf"'moe\.fc1.*{said}"), fo.fusion(fused), fo.debug():
        call(model["moe"], [1, 2, 3, 9], "cuda")
        call(model["moe"], ends, "cuda")


@pytest.mark.gpu
def test_good_ends_are_checked_without_waiting(no_synchronisation: Any) -> None:
    model = experts(device="cuda")
    x, probs = torch.randn(ROWS, D, device="cuda"), torch.ones(ROWS, device="cuda")
    offs = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device="cuda")
    with fo.debug():
        model(x, offs=offs, probs=probs)
        with no_synchronisation():
            model(x, offs=offs, probs=probs)
