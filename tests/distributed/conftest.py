"""Processes that the laws of several ranks run in, one set a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from spawned import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks(2)
    yield both
    both.stop()
