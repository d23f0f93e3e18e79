"""Quantized tokens that travel as words are the same tokens behind the exchange."""

import pytest
import torch

from fuseops.distributed.dispatch.codes import is_transportable, pack_rows, unpack_rows
from fuseops.recipes import Float8BlockScaling, quantize


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
