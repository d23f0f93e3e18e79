"""What a node saves comes back as it was, whatever the calls before it saved."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fuseops as fo
from fuseops.plan.segment import Segment
from fuseops.run.saving import pack, unpack

A, B, WEIGHT = torch.ones(2), torch.ones(2), nn.Parameter(torch.ones(2))
VALUES = (A, B, None, 1.5, 2.5, WEIGHT)


@pytest.fixture(scope="module")
def segment() -> Segment:
    """Of a joint op and one beside it, so that several fields of two Saved are kept."""
    model = fo.Sequential(fo.ops.RMSNorm(4), fo.ops.Linear(4, 4), fo.ops.SiLU(), fo.ops.SiLU())
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    ((_, run),) = model._runner.pieces
    (plan,) = run.plans.last_call.plans.values()
    return max(plan.segments, key=lambda seg: len(seg.kept))


CHANGES = st.lists(st.tuples(st.integers(0, 15), st.sampled_from(VALUES)), min_size=24, max_size=24)


@given(st.lists(st.sampled_from(VALUES[:4]), min_size=16, max_size=16), CHANGES)
def test_each_call_gets_what_it_saved(
    segment: Segment, drawn: list[Any], changes: list[tuple[int, Any]]
) -> None:
    """Calls that differ in one field from the one before."""
    assert 3 < len(segment.kept) <= 16
    for k, value in [(0, drawn[0]), *[(k % len(segment.kept), v) for k, v in changes]]:
        drawn[k] = value
        kept = [*drawn[: len(segment.kept)]]
        flat, rows = pack(segment, kept)
        assert len({*map(id, flat)}) == len(flat)
        for value, back in zip(kept, unpack(rows, flat), strict=True):
            assert back is value or (not isinstance(value, torch.Tensor) and back == value)
