"""Hardware profiles: curves mean what their points say, files come back as they went."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseops.errors import FuseOpsError
from fuseops.offload.planning.hardware import ATTENTION_SAVES, Curve, Hardware

sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def curves(draw: Any) -> Curve:
    """Curves whose copies take longer when they are larger."""
    seconds, points = 0.0, []
    for size in draw(sizes):
        seconds += draw(st.floats(1e-6, 1.0))
        points.append((size, size / seconds / 1e9))
    return Curve(tuple(points))


@given(curves())
def test_a_curve_goes_through_its_points(curve: Curve) -> None:
    for size, rate in curve.points:
        assert curve.seconds(size) == pytest.approx(size / rate / 1e9)
    largest, rate = curve.points[-1]
    assert curve.seconds(10 * largest) == pytest.approx(10 * largest / rate / 1e9)
    assert curve.seconds(0) == 0


@given(curves(), st.integers(1, 1 << 41), st.integers(1, 1 << 41))
def test_a_larger_copy_never_takes_less(curve: Curve, a: int, b: int) -> None:
    assert curve.seconds(min(a, b)) <= curve.seconds(max(a, b)) * (1 + 1e-9)


@given(curves(), st.integers(1, 1 << 41))
def test_a_copy_takes_time(curve: Curve, nbytes: int) -> None:
    assert curve.seconds(nbytes) > 0


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((1, 0.0),)])
def test_a_curve_refuses_what_is_none(points: Any) -> None:
    with pytest.raises(FuseOpsError, match="ascending bytes"):
        Curve(points)


def test_the_shipped_profile_says_what_it_is() -> None:
    here = Hardware.h200()
    assert "H200" in here.name and "shipped" in here.source
    assert 50 < here.d2h.peak < 60 and 50 < here.h2d.peak < 60
    one_way, both_ways = (here.copy_seconds("d2h", 1 << 28, duplex=d) for d in (False, True))
    assert one_way <= both_ways < 2 * one_way  # full duplex, and a little slower


def test_both_ways_is_never_faster_than_one() -> None:
    curve = Curve(((1, 1.0),))
    here = Hardware("x", curve, curve, Curve(((1, 100.0),)), memory=1.0)
    assert here.copy_seconds("h2d", 5, duplex=True) == here.copy_seconds("h2d", 5)


def test_the_roofline_is_the_slower_of_two_where_they_are_far_apart() -> None:
    here = replace(Hardware.h200(), launch=0.0)
    flops = 2 * 8192**3
    rate = here.matmul["bfloat16"] * 1e12
    assert here.op_seconds(flops, 1, "bfloat16") == pytest.approx(flops / rate)
    assert here.op_seconds(1, 1 << 30, "bfloat16") == pytest.approx((1 << 30) / here.memory / 1e9)
    alike = here.op_seconds(flops, round(1e9 * here.memory * flops / rate), "bfloat16")
    assert alike == pytest.approx(2**0.5 * flops / rate)  # neither hides the other


def test_small_and_transposing_ops_take_more_than_their_bytes() -> None:
    here = replace(Hardware.h200(), launch=2e-6, transposing=1000.0)
    assert here.op_seconds(0, 4, "float32") == pytest.approx(2e-6, rel=1e-3)
    assert here.op_seconds(0, 1 << 30, "float32", transposing=True) == pytest.approx(
        2e-6 + (1 << 30) / 1e12
    )


def test_profiles_come_back_from_files(tmp_path: Path) -> None:
    here = Hardware.h200()
    plain, printed = tmp_path / "a.json", tmp_path / "b.json"
    plain.write_text(json.dumps(here.to_json()))
    printed.write_text(json.dumps({"schema_version": 1, "measured": here.to_json()}))
    assert Hardware.load(plain) == Hardware.load(printed) == here


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 0}', '{"measured": {}}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FuseOpsError, match="hardware profile"):
        Hardware.load(path)


def test_an_unknown_attention_is_refused() -> None:
    curve = Curve(((1, 1.0),))
    with pytest.raises(FuseOpsError, match="attention"):
        Hardware("x", curve, curve, curve, memory=1.0, attention="fast")


@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4),
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4),
)
def test_ranks_that_measured_together_plan_for_the_slowest(
    links: list[float], devices: list[float]
) -> None:
    base = Hardware.h200()
    found = [
        replace(base.slower(link), memory=base.memory * rate, launch=base.launch * rate)
        for link, rate in zip(links, devices, strict=False)
    ]
    one = Hardware.slowest(found)
    for nbytes in (1 << 20, 3 << 20, 1 << 30):
        for lane in ("d2h", "h2d"):
            took = [here.copy_seconds(lane, nbytes, duplex=True) for here in found]
            assert one.copy_seconds(lane, nbytes, duplex=True) >= max(took) * (1 - 1e-9)
    assert one.memory == min(h.memory for h in found) and one.launch == max(h.launch for h in found)
    assert Hardware.slowest(found[::-1]) == one  # ranks alike
    with pytest.raises(FuseOpsError, match="other sizes"):
        Hardware.slowest([base, base.with_link(1.0)])
    with pytest.raises(FuseOpsError, match="one profile or more, got none"):
        Hardware.slowest([])
    for factor in (0, -1.0, float("nan"), "2"):
        with pytest.raises(FuseOpsError, match="a finite number above 0"):
            base.slower(factor)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to measure")
def test_measuring_without_a_device_says_so() -> None:
    with pytest.raises(FuseOpsError, match="torch sees none"):
        Hardware.measure()


@pytest.mark.gpu
def test_measuring_a_device() -> None:
    here = Hardware.measure()
    assert Hardware.from_json(here.to_json()) == here
    assert here.both.peak >= max(here.d2h.peak, here.h2d.peak) * 0.9
    assert here.attention in ATTENTION_SAVES and here.attention_rate > 0
    assert all(rate > 0 for rate in here.matmul.values())
    assert 0 < here.transposing < here.memory and 0 < here.launch < 1e-5
