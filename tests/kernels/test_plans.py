"""Plans of launches: one a kind of call and an override, one launch an address."""

import pytest
import torch

from fuseops.kernels import configs, grouped, grouped_paths, plans
from fuseops.kernels.launch import recording
from fuseops.kernels.plans import Plan, planned, planning

KEY = ("kind",)


def test_a_launch_is_made_once_for_an_address_and_forgotten_when_there_are_many():
    made, again = [], []

    def run(*operands):
        made.append(operands)
        return lambda: again.append(operands)

    plan = Plan("tma", run)
    for where in (1, 2, 1, 1, 2):
        plan((where,), "operand", where)
    assert made == [("operand", 1), ("operand", 2)]
    assert again == [("operand", 1), ("operand", 1), ("operand", 2)]
    for where in range(plans.MOST_KEPT + 1):
        plan((where,), where)
    assert len(plan.launches) <= plans.MOST_KEPT


def test_what_cannot_be_launched_again_is_run_each_time():
    made = []
    plan = Plan("pointer", lambda *operands: made.append(operands))
    plan((1,), 1), plan((1,), 1)
    assert len(made) == 2 and not plan.launches


def test_plans_of_an_override_are_its_own_and_are_kept():
    first, second = grouped_paths.MM_TMA, grouped_paths.WGRAD_TMA
    config = first.candidates((2, 64, 64), 2)[0]
    outside = planned.now
    with configs.forced(first, config):
        inside = planned.now
        with configs.forced(second, config):
            nested = planned.now
        with configs.asking():
            asked = planned.now
        with recording(90):
            recorded = planned.now
    with configs.forced(second, config):
        other = planned.now
    with grouped_paths.on_path("tma"):
        path = planned.now
    everything = [outside, inside, nested, asked, recorded, other, path]
    assert len({*map(id, everything)}) == len(everything) and planned.now is outside
    for _ in range(2):
        with configs.forced(first, config), configs.forced(second, config):
            assert planned.now is nested
    with pytest.raises(ZeroDivisionError), planning():
        raise ZeroDivisionError
    assert planned.now is outside


def test_new_tables_make_new_plans(tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "now", plans.Plans())
    with configs.forced(grouped_paths.MM_TMA, {"BLOCK_M": 1}):
        planned.now[KEY] = Plan("", print)
    planned.now[KEY] = Plan("", print)
    configs.reload_tables()
    with configs.forced(grouped_paths.MM_TMA, {"BLOCK_M": 1}):
        assert KEY not in planned.now
    assert KEY not in planned.now


def problem(rows, dtype=torch.float32):
    offs = torch.tensor([rows // 3, rows - 1], dtype=torch.int32)
    return torch.randn(rows, 16, dtype=dtype), torch.randn(2, 24, 16, dtype=dtype), offs


def test_operands_of_a_known_kind_are_still_told_apart(kernels):
    """What a plan does not look at again: everything that `check` refuses is of another kind."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, offs = (t.to(device) for t in problem(40))
    tiles = grouped.group_tiles(offs, 40)
    y = grouped.grouped_mm(x, weight, offs, tiles)
    dw = grouped.grouped_wgrad(y, x, offs, tiles)
    wrong = [
        lambda: grouped.grouped_mm(x[:, :8], weight, offs, tiles),
        lambda: grouped.grouped_mm(x, weight[:1], offs, tiles),
        lambda: grouped.grouped_mm(x, weight, offs[:1], tiles),
        lambda: grouped.grouped_mm(x, weight, offs.long(), tiles),
        lambda: grouped.grouped_mm(x, weight, offs, tiles[1:]),
        lambda: grouped.grouped_mm(x, weight, offs, tiles.long()),
        lambda: grouped.grouped_mm(x, weight, offs, tiles, weight[:, 1:, 0]),
        lambda: grouped.grouped_mm(x, weight, offs, tiles, None, offs.float()),
        lambda: grouped.grouped_mm(x.half(), weight, offs, tiles),
        lambda: grouped.grouped_wgrad(y[1:], x, offs, tiles),
        lambda: grouped.grouped_wgrad(y, x.half(), offs, tiles),
        lambda: grouped.grouped_wgrad(y, x, offs, tiles[1:]),
        lambda: grouped.grouped_wgrad_into(dw[1:], y, x, offs, tiles),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises(grouped.FuseOpsError):
            call()
            pytest.fail(f"call {number} passed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides_of_small_operands(kernels, dtype):
    """An index, ends, a table and a bias with gaps between their elements."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, offs = (t.to(device) for t in problem(40, dtype))
    gaps = lambda t: torch.stack([t, torch.full_like(t, 7)], -1)[..., 0]  # noqa: E731
    index = torch.randperm(40, device=device)
    bias = torch.randn(2, 24, device=device, dtype=dtype)
    tiles = grouped.group_tiles(offs, 40)
    want = grouped.grouped_mm(x, weight, offs, tiles, bias, index)
    for _ in range(2):
        got = grouped.grouped_mm(x, weight, gaps(offs), gaps(tiles), gaps(bias), gaps(index))
        assert torch.equal(got, want)
        assert torch.equal(grouped.group_tiles(gaps(offs), 40), tiles)
        dw = grouped.grouped_wgrad(got, x, gaps(offs), gaps(tiles), None, gaps(index))
        assert torch.equal(dw, grouped.grouped_wgrad(got, x, offs, tiles, None, index))
