"""Host memory: exact, asked for once, never given twice, ordered after its last reader."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fuseops import torch_private
from fuseops.offload.lanes import cuda
from fuseops.offload.lanes.arena import ALIGN, REGION, Arena, Slab, aligned
from fuseops.offload.lanes.protocol import Event, NoRoomError

sizes = st.integers(1, 3 * REGION // 2)


@given(steps=st.lists(st.one_of(sizes, st.integers(-30, -1)), max_size=60))
def test_slabs_never_overlap_and_regions_hold_them(steps: list[int]) -> None:
    regions: list[int] = []

    def make(nbytes: int) -> int:
        regions.append(nbytes)
        return nbytes

    arena = Arena(make)
    out: list[Slab] = []
    for step in steps:
        if step > 0:
            slab = arena.take(step)
            assert (
                slab.nbytes == step and slab.capacity == aligned(step) and slab.offset % ALIGN == 0
            )
            assert slab.offset + slab.capacity <= regions[slab.region]
            for other in out:
                assert (
                    other.region != slab.region
                    or other.offset + other.capacity <= slab.offset
                    or slab.offset + slab.capacity <= other.offset
                )
            out.append(slab)
        elif out:
            arena.give_back(out.pop(-step % len(out)))
    assert arena.used == sum(s.capacity for s in out) <= arena.peak <= arena.reserved
    assert arena.reserved == sum(regions)
    for slab in out:
        arena.give_back(slab)
    assert arena.used == 0
    for region in sorted(regions, reverse=True):  # all of it is in one piece again
        assert arena.take(region).capacity == aligned(region)
    assert len(arena.regions) == len(regions)


@given(wanted=st.lists(sizes, min_size=1, max_size=12))
def test_the_same_requests_get_the_same_places(wanted: list[int]) -> None:
    arena = Arena(lambda nbytes: nbytes)

    def step() -> list[tuple[int, int]]:
        slabs = [arena.take(nbytes) for nbytes in wanted]
        for slab in slabs:
            arena.give_back(slab)
        return [(s.region, s.offset) for s in slabs]

    step()
    second, reserved = step(), arena.reserved
    assert step() == second and arena.reserved == reserved


few_sizes = st.sampled_from([1, 2 * ALIGN, 3 * ALIGN, REGION // 2, REGION])


@example(steps=[1, 1, -1, -1, 2 * ALIGN, -1, 3 * ALIGN, 1])  # all is given back in the middle
@given(steps=st.lists(st.one_of(few_sizes, st.integers(-30, -1)), max_size=40))
def test_a_step_that_takes_and_gives_in_turn_gets_the_same_places(steps: list[int]) -> None:
    """Whether or not slabs are divided and made one with others on its way."""
    arena = Arena(lambda nbytes: nbytes)

    def step() -> list[tuple[int, int]]:
        out, places = [], []
        for wanted in steps:
            if wanted > 0:
                out.append(slab := arena.take(wanted))
                places.append((slab.region, slab.offset))
            elif out:
                arena.give_back(out.pop(-wanted % len(out)))
        for slab in out:
            arena.give_back(slab)
        return places

    step(), step(), step()
    fourth, reserved = step(), arena.reserved
    assert step() == fourth and arena.reserved == reserved


N = 12  # slabs of a step at most
per_mille = st.lists(st.integers(-50, 50), min_size=N, max_size=N)


def varied(bases: list[int], changes: Sequence[int]) -> list[int]:
    return [base * (1000 + k) // 1000 for base, k in zip(bases, changes, strict=False)]


@given(
    bases=st.lists(st.integers(REGION // 8, 6 * REGION), min_size=1, max_size=N),
    steps=st.lists(per_mille, min_size=20, max_size=20),
    grow=st.booleans(),
)
def test_sizes_that_vary_by_a_twentieth_ask_for_memory_in_a_few_steps(
    bases: list[int], steps: list[list[int]], grow: bool
) -> None:
    """Whether or not they grow all the time: in six steps after the first, and for three times what is used at most."""
    arena, reserved = Arena(lambda nbytes: nbytes), []
    for changes in zip(*map(sorted, zip(*steps, strict=True)), strict=True) if grow else steps:
        slabs = [arena.take(nbytes) for nbytes in varied(bases, changes)]
        while slabs:
            arena.give_back(slabs.pop())
        reserved.append(arena.reserved)
    assert len({*reserved}) <= 1 + 6
    assert arena.reserved <= 3 * max(arena.peak, REGION)


@given(steps=st.lists(st.one_of(few_sizes, st.integers(-30, -1)), max_size=40))
def test_a_step_of_constant_sizes_asks_for_exactly_those(steps: list[int]) -> None:
    """In whatever order slabs are taken and given back, as long as one is out until the end."""
    regions: list[int] = []
    arena = Arena(regions.append)
    for _ in range(4):
        first, out = arena.take(1), []
        for wanted in steps:
            if wanted > 0:
                out.append(arena.take(wanted))
            elif out:
                arena.give_back(out.pop(-wanted % len(out)))
        for slab in (first, *out):
            arena.give_back(slab)
    assert {*regions} <= {max(REGION, aligned(wanted)) for wanted in (1, *steps) if wanted > 0}


@given(
    bases=st.lists(st.integers(REGION // 2, 4 * REGION), min_size=2, max_size=N),
    steps=st.lists(per_mille, min_size=8, max_size=8),
    share=st.integers(4, 16),
)
def test_half_of_a_budget_is_for_what_is_asked_exactly(
    bases: list[int], steps: list[list[int]], share: int
) -> None:
    budget, wanted = sum(bases) * share // 4, 0

    def make(nbytes: int) -> int:
        exact = min(max(aligned(wanted), REGION), budget - arena.reserved)
        assert nbytes == exact or (nbytes > exact and 2 * (arena.reserved + nbytes) <= budget)
        return nbytes

    arena = Arena(make, budget)
    for changes in steps:
        slabs = []
        for wanted in varied(bases, changes):
            try:
                slabs.append(arena.take(wanted))
            except NoRoomError:
                assert aligned(wanted) > budget - arena.reserved
        while slabs:
            arena.give_back(slabs.pop())
        assert arena.reserved <= budget


def test_large_buffers_have_regions_of_exactly_their_size() -> None:
    arena = Arena(lambda nbytes: nbytes)
    arena.take(REGION + 1)
    assert arena.reserved == aligned(REGION + 1)


def test_the_next_user_waits_for_the_last_reader_of_all_that_it_covers() -> None:
    arena = Arena(lambda nbytes: nbytes)
    slabs = [arena.take(REGION // 4) for _ in range(4)]
    events = [Event("h2d") for _ in slabs]
    for k in (2, 0, 3, 1):
        slabs[k].after = events[k]
        arena.give_back(slabs[k])
    assert arena.take(REGION).after is events[3]


def test_a_budget_is_a_reason_and_is_never_passed() -> None:
    arena = Arena(lambda nbytes: nbytes, budget=10 * ALIGN)
    first = arena.take(6 * ALIGN)
    with pytest.raises(
        NoRoomError, match=rf"host budget of {10 * ALIGN} bytes: {6 * ALIGN} in use"
    ):
        arena.take(5 * ALIGN)
    arena.take(4 * ALIGN)
    arena.give_back(first)
    arena.take(6 * ALIGN)
    assert arena.reserved <= 10 * ALIGN


def test_memory_that_cannot_be_had_changes_nothing() -> None:
    def fail(nbytes: int) -> Any:
        raise MemoryError("none left")

    arena = Arena(fail)
    with pytest.raises(MemoryError):
        arena.take(1)
    assert arena.reserved == arena.used == 0 and arena.regions == []


class Cudart:
    """Says yes or no to pinning."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.asked: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append(nbytes)
        return self.error


@pytest.mark.parametrize("error", [0, 2])
def test_pinning_asks_for_the_exact_size_and_falls_back_to_pageable_memory(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = Cudart(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch_private, "is_capturing", lambda: False)
    region = cuda.pinned(12345 * 512)
    assert region.numel() == 12345 * 512 and cudart.asked == [12345 * 512]
    region.fill_(7)  # real memory, pinned or not
    assert ("could not be pinned" in caplog.text) == (error != 0)


def mapping(address: int) -> tuple[list[str], list[str]]:
    """The first line and the flags of what /proc says of the memory that is mapped there."""
    found: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", words[0]):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            found = words if begin <= address < end else []
        elif found and words[0] == "VmFlags:":
            return found, words[1:]
    pytest.skip("/proc has no flags of mappings")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="there is no /proc")
def test_pinned_memory_has_huge_pages_and_is_no_child_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(0))
    monkeypatch.setattr(torch_private, "is_capturing", lambda: False)
    region = cuda.pinned(4 << 20)
    first, flags = mapping(region.data_ptr())
    assert first[1] == "rw-p" and {"hg", "dc"} <= {*flags}


def test_a_capture_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the step once before"):
        cuda.pinned(512)
