"""What a call reads besides its arguments: laws over every registered op."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops.op import Op
from fuseops.testing.catalogue import exported
from fuseops.testing.strategies import op_cases

OPS = exported()
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
# A third of the profile's examples, for laws that few drawn choices can break.
some = settings(max_examples=settings.default.max_examples // 3)

DIGITS = "0123456789"  # of a group's own parameter


def without_values(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta")


@every_op
@some
@given(data=st.data())
def test_a_tensor_without_values_beside_others_is_refused_by_name(
    op: type[Op], data: st.DataObject
) -> None:
    """torch itself multiplies a real matrix by one on meta, into memory that nobody wrote."""
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    inside = not case.model.writes and data.draw(st.booleans())
    model = fo.Sequential({"op": case.model}) if inside else case.model
    if data.draw(st.booleans()):
        model(case.x, **case.side)  # there is a plan already
    inner, held = case.model, {**case.model._parameters, **case.model._buffers}
    held = {name: t for name, t in held.items() if t is not None}
    given = {"x": case.x, **case.side, **held}
    if len(given) == 1:
        return  # nothing to mix
    name = data.draw(st.sampled_from(sorted(given)))
    if name in held:
        registry = inner._parameters if name in inner._parameters else inner._buffers
        value = without_values(held[name].detach())
        registry[name] = nn.Parameter(value) if registry is inner._parameters else value
    side = {n: without_values(t) if n == name else t for n, t in case.side.items()}
    with pytest.raises(fo.FuseOpsError, match=rf"\b{name.rstrip(DIGITS)}\d*\b.*on the meta device"):
        model(without_values(case.x) if name == "x" else case.x, **side)


def test_a_model_that_is_all_on_meta_runs_there() -> None:
    moe = fo.MoE(16, 32, num_experts=4, top_k=2, device="meta")
    assert moe(torch.empty(8, 16, device="meta")).shape == (8, 16)
