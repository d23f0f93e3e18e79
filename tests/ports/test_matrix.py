"""Every port under every feature, alone and in pairs, gives the stock model's outputs, losses and gradients, or is
refused with the error that the table declares."""

from __future__ import annotations

import functools
import importlib

import pytest
import table
import torch
from features import FEATURES, PORTS, REFUSED, Cell, Feature, cells, refusal, title
from port import Port, Step
from run import coarsest, differences, ported, reference

# dynamo looks at .grad of every input that it makes a fake of, leaf or not
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SINGLE = [cell for cell in cells() if all(feature.ranks == 1 for feature in cell)]


@functools.cache
def load(name: str) -> Port:
    port: Port = importlib.import_module(name).PORT
    return port


@functools.cache
def expected(port: Port, cell: tuple[Feature, ...]) -> Step:
    """The reference, once for all cells that have the same one."""
    return reference(port, cell)


def judged(port: Port, cell: Cell) -> Step:
    return expected(port, tuple(f for f in cell if f.on_stock or f.changes_numerics))


@pytest.mark.parametrize("cell", SINGLE, ids=title)
@pytest.mark.parametrize("name", PORTS)
def test_cell(name: str, cell: Cell) -> None:
    if torch.__version__.startswith("2.11.") and any("compile" in f.name for f in cell):
        pytest.skip("inductor of torch 2.11 cannot compile attention of float64 on a CPU")
    port, refused = load(name), refusal(name, cell)
    if refused is not None:
        with pytest.raises(refused.error, match=refused.match):
            ported(port, cell)
        return
    assert not differences(ported(port, cell), judged(port, cell), coarsest(cell))


def test_the_table_is_up_to_date() -> None:
    """`python tests/ports/table.py` writes it."""
    assert table.FILE.read_text(encoding="utf-8") == table.text()


def test_every_refusal_is_of_a_cell() -> None:
    """An entry that no cell falls under says nothing."""
    names = {feature.name for feature in FEATURES}
    for entry in REFUSED:
        assert set(entry.features) <= names and set(entry.ports) <= set(PORTS)
