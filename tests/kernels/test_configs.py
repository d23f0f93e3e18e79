"""The configuration layer: what is picked, what tuning stores, and several processes at once."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseops.errors import FuseOpsError
from fuseops.kernels import configs
from fuseops.kernels.launch import INTERPRET
from fuseops.kernels.registry import KERNEL_OPS

WIDTHS = (1, 3, 64, 100, 768, 2048, 4096, 5120, 7168, 14336, 16384)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEOPS_CACHE_DIR", str(tmp_path))
    configs.reload_tables()
    yield tmp_path
    monkeypatch.undo()
    configs.reload_tables()


@pytest.mark.parametrize("space", configs.SPACES.values(), ids=lambda s: s.name)
@given(data=st.data())
def test_defaults_are_candidates(space, data):
    dims = tuple(data.draw(st.sampled_from(WIDTHS), label=name) for name in space.dims)
    itemsize = data.draw(st.sampled_from((2, 4)))
    allowed = list(space.candidates(dims, itemsize))
    assert len(allowed) == len({json.dumps(c) for c in allowed}), "a configuration is listed twice"
    for rows in (0, 1, 512, 1 << 18):
        assert space.default(rows, dims, itemsize) in allowed


def test_dimensions_are_those_of_the_space():
    with pytest.raises(FuseOpsError, match="picks by"):
        configs.SPACES["grouped_mm"].pick(1, (64,), torch.zeros(1))


def test_a_space_without_candidates_is_refused():
    with pytest.raises(FuseOpsError, match="'empty' has no candidates"):
        configs.Space("empty", [])
    assert "empty" not in configs.SPACES


def test_a_function_that_lists_no_candidates_is_named(monkeypatch):
    monkeypatch.setattr(configs, "SPACES", {})
    space = configs.Space("none", lambda dims, itemsize: [])
    with pytest.raises(FuseOpsError, match=r"space 'none' has no candidates for .*columns"):
        space.pick(4, (64,), torch.empty(0))


def test_shipped_table_holds_candidates_only():
    for key, config in configs.shipped_table().items():
        name, _, dtype, dims, _ = key.split("/")
        allowed = configs.SPACES[name].candidates(
            tuple(map(int, dims.split("x"))), getattr(torch, dtype).itemsize
        )
        assert config in list(allowed), key


def test_buckets():
    assert [configs.bucket(n) for n in (0, 1, 2, 3, 1000, 1024, 1 << 20)] == [
        0,
        1,
        2,
        4,
        1024,
        1024,
        1 << 18,
    ]


def test_tuning_picks_the_fastest_and_is_remembered(cache):
    op, space = KERNEL_OPS["act_bwd"], configs.SPACES["act_bwd"]
    x, dy = torch.randn(100, 64), torch.randn(100, 64)
    wanted = list(space.candidates((64,), 4))[-1]
    ticks = []

    def time_us(call):
        call()
        return 1.0 if space.forced == wanted else 2.0

    stored = configs.tune(
        lambda: op.launcher(dy, x, "silu") if INTERPRET else space.pick(100, (64,), x),
        time_us,
        progress=lambda *step: ticks.append(step),
    )
    assert stored == {"act_bwd/sm90/float32/64/r128": wanted}
    assert space.pick(127, (64,), x) == wanted and space.pick(129, (64,), x) == space.default(
        256, (64,), 4
    )
    assert [t[1:] for t in ticks] == [(i + 1, len(ticks)) for i in range(len(ticks))]
    document = json.loads(configs.cache_file().read_text())
    assert document["versions"] == configs.versions() and document["schema_version"] == 1


def test_entries_that_are_no_candidates_are_ignored():
    space = configs.SPACES["act_fwd"]
    configs.store({"act_fwd/sm90/float32/64/r128": {"BLOCK_R": 7, "BLOCK_N": 64, "num_warps": 4}})
    assert space.pick(128, (64,), torch.zeros(1)) == space.default(128, (64,), 4)


def test_a_broken_file_is_named():
    configs.cache_file().write_text("{")
    configs.reload_tables()
    with pytest.raises(FuseOpsError, match="cannot read the configuration table"):
        configs.SPACES["act_fwd"].pick(1, (64,), torch.zeros(1))


def test_several_processes_lose_nothing(cache):
    code = (
        "import sys; from fuseops.kernels import configs\n"
        "for i in range(20): configs.store({f'{sys.argv[1]}{i}': {'a': i}})"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "ab"]
    assert [p.wait() for p in processes] == [0, 0]
    assert len(json.loads(configs.cache_file().read_text())["entries"]) == 40
