"""Quantized tokens that travel as words are the same tokens where they arrive."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import fuseops as fo
from fuseops.distributed.dispatch.codes import (
    is_transportable,
    pack_rows,
    transport_format,
    unpack_rows,
)
from fuseops.ops.op import AcrossRanks, Call, Grads, NothingSaved, Op, Out
from fuseops.recipes import Float8BlockScaling, Recipe, quantize
from fuseops.testing.strategies import filled, recipes


@pytest.mark.parametrize("width", [1, 8, 127, 128, 129, 300])
@pytest.mark.parametrize("rows", [0, 1, 4, 65])
def test_words_stand_for_the_codes_and_scales_of_every_row(rows: int, width: int) -> None:
    scaling = Float8BlockScaling().roles().input
    assert scaling is not None and is_transportable(scaling)
    x = torch.randn(rows, width) * 2.0 ** torch.arange(rows)[:, None]
    q = quantize(x, scaling)
    back = unpack_rows(pack_rows(q), q)
    mine, theirs = (map(torch.Tensor.float, found.row[:2]) for found in (back, q))
    assert all(map(torch.equal, mine, theirs))


class FromTwoRanks(Op[NothingSaved]):
    """y = x, of which two ranks sent a part each."""

    saves_for = {"x": ()}
    across_ranks = AcrossRanks(sends=True)
    takes_quantized = True

    def fwd(self, x: Tensor, *, call: Call) -> Out:
        scaling = transport_format(call.precision.roles)
        if scaling is None:
            return Out(x, NothingSaved())
        parts = [quantize(part, scaling, col=False) for part in x.split(40)]
        words = torch.cat([*map(pack_rows, parts)])
        return Out(unpack_rows(words, parts[0]), NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> Grads:
        return Grads(dy)


@given(recipe=recipes())
def test_what_is_computed_of_tokens_that_travelled_is_what_is_computed_of_those_here(
    recipe: Recipe,
) -> None:
    torch.manual_seed(0)
    fc = fo.ops.Linear(160, 32, bias=False, dtype=torch.bfloat16)
    found: list[list[Tensor]] = []
    for before in ((), (FromTwoRanks(),)):
        x: Any = filled((70, 160), torch.bfloat16, "normal", 1).requires_grad_()
        with fo.recipe(recipe):
            y = fo.Sequential(*before, fc)(x)
            found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, fc.weight])])
    assert all(map(torch.equal, *found))


def test_tokens_travel_as_codes_under_a_recipe_of_rows_and_squares() -> None:
    roles = Float8BlockScaling().roles()
    assert transport_format(roles) is roles.input
    assert transport_format(None) is None
