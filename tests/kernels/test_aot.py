"""The ahead-of-time table is complete and fresh, and a sample of it compiles, without a GPU."""

import json
import os

import fresh
import pytest

from fuseops.kernels import aot
from fuseops.kernels.grouped_paths import GLUON_TESTED

RELEASES = GLUON_TESTED  # of Triton
FAST = {**os.environ, "TRITON_INTERPRET": "0"}


def run(*args):
    return fresh.run("-m", "fuseops", "kernels", *args, env=FAST)


def compile_and_look(script, *arguments):
    """Kernels are compiled in a process of their own: this one may interpret them."""
    pytest.importorskip("triton")
    done = fresh.run("-c", script, *arguments, env=FAST)
    assert done.returncode == 0, done.stderr[-2000:]


def test_table_is_fresh_and_a_sample_compiles():
    pytest.importorskip("triton")
    done = run("--check", "--sample", "16")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


ONE_ELEMENT_A_LANE = r"""
import torch
from fuseops.kernels import aot, bias, norm
from fuseops.kernels.replay import recording
x, w = torch.empty(64, 100, device="meta"), torch.empty(3, 100, device="meta")
offs, probs = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(64, device="meta")
few, scale = torch.empty(64, 7, device="meta"), torch.empty(7, device="meta")
for op, *args in (
    (bias.grouped_bias_bwd, x, offs, probs, w),
    (norm.rmsnorm_fwd, few, scale, 1e-6),
    (norm.rmsnorm_bwd, few, few, scale, probs),
    (norm.layernorm_fwd, few, scale, scale, 1e-6),
    (norm.layernorm_bwd, few, few, scale, probs, probs),
):
    with recording(90) as recorder:
        op.launcher(*args)
    ptx = aot.compiled(recorder.launches[0], 90).asm["ptx"]
    assert "shfl.sync.bfly" in ptx and not aot.contracted(ptx), (op.name, aot.contracted(ptx))
"""


def test_all_lanes_of_a_row_hold_the_same_dot_product():
    """A product contracted with the exchange between lanes would round another way in each of them,
    and lanes that hold one sum race to store it.
    """
    compile_and_look(ONE_ELEMENT_A_LANE)


@pytest.mark.parametrize("release", RELEASES)
def test_no_row_ships_with_a_problem(release):
    table = aot.read_table(release)
    assert len(table) > 100
    for key, row in table.items():
        arch, kernel = int(key.rsplit("_", 1)[1]), key.split()[0]
        built = aot.Row(row["op"], kernel, "", arch, "", None)
        assert aot.problem_of(built, row, release) is None, key


SOURCES = r"""
import json, sys
from fuseops.kernels import aot
apart = [row for row in aot.rows(archs=(90,)).values() if aot.depends_on_release(row)]
for release in sys.argv[1:]:
    said = json.loads(aot.table_path(release).read_text())["sources"]
    now = aot.sources_of(apart)
    stale = sorted(k for k in now.keys() | said if now.get(k) != said.get(k))
    assert not stale, (
        f"stale in aot_{release}.json: {', '.join(stale)}. With a FOLDER of `pip install --no-deps --target FOLDER "
        f"triton=={release}.0`, `PYTHONPATH=FOLDER make aot` compiles them"
    )
"""


def test_tables_of_other_tritons_are_of_these_kernels():
    compile_and_look(SOURCES, *(r for r in RELEASES if r != aot.PINNED))


LOADER = r"""
import re, torch
from fuseops.kernels import aot, fp8
from fuseops.kernels.replay import recording
with recording(90) as recorder:
    fp8.fp8_wgrad.launcher(*next(iter(fp8.fp8_wgrad.cases())))
ttgir = aot.compiled(recorder.launches[-1], 90).asm["ttgir"]
loader = ttgir[ttgir.index("partition1(") :]
carried = re.search(r"scf\.for [^\n]* iter_args\(([^\n]*?)\) -> ", loader)[1]
assert carried.count(" = ") == 2, carried
"""


def test_the_loader_of_a_grouped_gradient_goes_on_to_other_groups():
    """Triton 3.6 drops what a loop carries where only bounds of a loop inside depend on it: the loader of FP8 weight
    gradients stayed at its first group, and the kernel never ended.
    """
    compile_and_look(LOADER)


@pytest.mark.parametrize("release", RELEASES)
def test_fp8_tiles_have_no_stack_at_all(release):
    """What the fence is for: without it a subtile's product is moved up, and spills 208 bytes and more in the loop."""
    assert "fp8_gemm_kernel" not in aot.SPILLS_ALLOWED
    found = {
        key: row
        for key, row in aot.read_table(release).items()
        if key.startswith("fp8_gemm_kernel ")
    }
    assert len(found) > 50
    assert all(row["stack"] == 0 and row["mma"] == "wgmma.mma" for row in found.values())


def test_a_conversion_that_does_not_saturate_may_not_ship():
    row = aot.Row("op", "kernel", "variant", 90, "new", None)
    result = {"regs": 32, "stack": 0, "shared": 0, "mma": "", "unsafe": "cvt.rn.e4m3x2.f32"}
    assert "without saturation" in aot.problem_of(row, result)


CONVERSIONS = """
cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r1;
cvt.rn.satfinite.e5m2x2.f32 %rs2, %r4, %r3;
mov.b32 %r9, {%rs1, %rs2};
cvt.rn.satfinite.e4m3x2.f32 %rs3, %r6, %r5;
"""


def test_a_conversion_of_which_words_and_bytes_are_used_may_not_ship():
    assert aot.misread(CONVERSIONS + "shr.u16 %rs4, %rs3, 8;") == []
    assert aot.misread(CONVERSIONS + "shr.u16 %rs4, %rs2, 8;") == ["%rs2"]
    row = aot.Row("op", "kernel", "variant", 90, "new", None)
    result = {"regs": 32, "stack": 0, "shared": 0, "mma": "", "misread": ["%rs2"]}
    assert "misreads" in aot.problem_of(row, result)


def test_changed_missing_and_unused_rows_are_named():
    row = aot.Row("op", "kernel", "variant", 90, "new", None)
    table = {row.key: {"hash": "old"}, "gone": {"hash": ""}}
    assert aot.stale({row.key: row, "b": row}, table) == {
        row.key: "changed",
        "b": "missing",
        "gone": "unused",
    }
    falls_back = row._replace(hash="", note="reference (needs sm_89)")
    table = {row.key: {"hash": "", "note": "says something else"}}
    assert aot.stale({row.key: falls_back}, table) == {row.key: "changed"}


def test_every_architecture_is_there():
    archs = {key.rsplit(" ", 1)[1] for key in aot.read_table(aot.PINNED)}
    assert archs == {f"sm_{a}" for a in aot.ARCHS}
    assert json.loads(aot.table_path(aot.PINNED).read_text())["schema_version"] == 1
