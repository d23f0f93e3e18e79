"""Compile every kernel ahead of time, without a GPU, and keep the results in a committed table.

    fuseops kernels                       # the table
    fuseops kernels --check --sample 12   # no stale or missing row, a sample compiles (what CI runs)
    fuseops kernels --rebuild --jobs 2    # rebuild the rows that changed; --all rebuilds every row

The rows are found by running the launchers: each kernel op lists its `cases` (arguments on the meta device), and under
`launch.recording` a launcher's launches are recorded, once for each configuration of each space that it requests.
A row is one compiled variant on one architecture, with a hash of the kernel's source (and of every device function it
calls), its signature and its options.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fuseops.errors import FuseOpsError
from fuseops.kernels import configs
from fuseops.kernels.launch import COMPILER, INTERPRET, Launch
from fuseops.kernels.peers import PEER_KERNELS, PeerKernel
from fuseops.kernels.registry import KERNEL_OPS, KernelOp
from fuseops.kernels.replay import recording
from fuseops.kernels.source import source_of

PINNED = "3.6"
"""The Triton whose table has every row; those of others have the rows that `depends_on_release` selects."""
ARCHS = (80, 90, 100, 120)
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
TMEM_LIMIT = 512
SPILLS_ALLOWED: dict[str, tuple[int, str]] = {
    "norm_fwd_kernel": (8, "4096 columns with a residual, weight and bias, of four warps"),
    "norm_bwd_kernel": (
        136,
        "16384 columns with dw and dres, of LayerNorm; a second pass would cost far more",
    ),
    "micro_mm_kernel": (
        8,
        "on sm_120: a slot that ptxas zeroes beside the scaled mma; nothing is spilled",
    ),
    "router_fwd_kernel": (8, "256 experts in groups, tokens of one warp"),
    "dswiglu_operand_kernel": (8, "on sm_120, of sixteen warps, which have no more registers"),
    "grouped_wgrad_pingpong_kernel": (16, "what a gather is told, once, before the first tile"),
}
"""Kernels that may spill, how many bytes and why."""
SPILLS_OF_OTHERS: dict[str, tuple[int, str]] = {
    "grouped_mm_pingpong_kernel": (8, "what a gather is told, read once a tile"),
    "grouped_wgrad_pingpong_kernel": (32, "what a gather is told, read once a tile"),
}
"""The same, of Tritons that are not pinned."""

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip

Fixed = dict[tuple[int], Any]


class Row(NamedTuple):
    """A `Row` is one variant of a kernel on one architecture, before it is compiled."""

    op: str
    kernel: str
    variant: str
    arch: int
    hash: str
    launch: Launch | None
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.variant} sm_{self.arch}"


def rows(archs: Iterable[int] = ARCHS) -> dict[str, Row]:
    """Every variant that some launcher can choose, by key."""
    if INTERPRET:
        raise FuseOpsError("the ahead-of-time table needs compiled kernels: unset TRITON_INTERPRET")
    found: dict[str, Row] = {}
    every: list[KernelOp[Any, Any] | PeerKernel] = [*KERNEL_OPS.values(), *PEER_KERNELS]
    for op in every:
        for args in op.cases():
            for arch in archs:
                for row in _rows_of(op, args, arch):
                    found.setdefault(row.key, row)
    return (
        found
        if configs.triton_release() == PINNED
        else {k: r for k, r in found.items() if depends_on_release(r)}
    )


def depends_on_release(row: Row) -> bool:
    """Whether a row is compiled for each release of Triton: kernels in Gluon, whose names change, and with FP8 codes,
    which another release may convert in a way that ptxas misreads (for sm_90 only, as a sample).
    """
    if row.launch is None or row.arch != 90:
        return False
    return row.launch.kernel.is_gluon() or "*fp8" in row.variant


def _rows_of(
    op: KernelOp[Any, Any] | PeerKernel, args: tuple[Any, ...], arch: int
) -> Iterator[Row]:
    if arch < op.min_arch:
        dtypes = ",".join(_TYPES[a.dtype] for a in args if isinstance(a, torch.Tensor))
        scalars = " ".join(_text(a) for a in args if not isinstance(a, torch.Tensor))
        yield Row(
            op.name,
            op.name,
            f"{dtypes} {scalars}",
            arch,
            "",
            None,
            f"reference (needs sm_{op.min_arch})",
        )
        return
    with recording(arch), configs.record_requests() as asked:
        op.launcher(*args)
    choices = [
        (space, c) for space, key in asked for c in space.candidates(key[2], key[1].itemsize)
    ]
    with recording(arch) as recorder:
        for space, config in choices:
            with configs.forced(space, config):
                op.launcher(*args)
        if not choices:
            op.launcher(*args)
    for launch in recorder.launches:
        variant, digest = _describe(launch, arch)
        yield Row(op.name, launch.kernel.__name__, variant, arch, digest, launch)


def _describe(launch: Launch, arch: int) -> tuple[str, str]:
    signature, constants, attrs = specialize(launch)
    types = ",".join(
        t + ("'" if (i,) in attrs else "")
        for i, t in enumerate(signature.values())
        if t != "constexpr"
    )
    names = launch.kernel.arg_names
    fixed = " ".join(f"{names[i]}={_text(v)}" for (i,), v in constants.items())
    compiler = " ".join(f"{k}={v}" for k, v in launch.options.items() if k not in names)
    variant = f"{types} {fixed} {compiler}"
    text = f"{source_of(launch.kernel)}|{variant}|{arch}"
    return variant, hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value).removeprefix("torch.")


def specialize(launch: Launch) -> tuple[dict[str, str], Fixed, Fixed]:
    """(signature, constants, attributes) as the JIT specializes such arguments: 16-byte aligned,
    ones folded.
    """
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.args, strict=False)) | {
        k: v for k, v in launch.options.items() if k in names
    }
    signature: dict[str, str] = {}
    constants: Fixed = {}
    attrs: Fixed = {}
    for i, param in enumerate(launch.kernel.params):
        value = given[param.name]
        if isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif param.is_constexpr or value is None or (value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constants[(i,)] = value
        elif hasattr(value, "block_shape"):
            signature[param.name] = _descriptor_type(value)
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attrs


def _descriptor_type(descriptor: Any) -> str:
    """The JIT's type of a tensor descriptor; Gluon's has a shared memory layout."""
    layout = getattr(descriptor, "layout", None)
    block = f"{_TYPES[descriptor.base.dtype]}{list(descriptor.block_shape)}"
    return f"tensordesc<{block}{'' if layout is None else f',{layout!r}'}>"


def compiled(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    options = {k: v for k, v in launch.options.items() if k not in kernel.arg_names}
    source = ASTSource(kernel, *specialize(launch))
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=COMPILER | options)


def compile_row(row: Row) -> dict[str, Any]:
    """Compile one row and measure it: registers, stack and shared bytes, tensor cores."""
    result: dict[str, Any] = {"op": row.op, "hash": row.hash}
    if row.launch is None:
        return result | {"note": row.note}
    kernel = compiled(row.launch, row.arch)
    usage = _resource_usage(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    unsafe = re.search(r"cvt\.rn\.(?!satfinite)\S*e[45]m[23]x2\.f32", ptx)
    misreads, contractions = misread(ptx), contracted(ptx)
    tmem = kernel.metadata.tmem_size or 0  # columns of the tensor memory of Blackwell
    mma = next((name for name in ("tcgen05.mma", "wgmma.mma", "mma.sync") if name in ptx), "")
    return (
        result
        | {
            "regs": usage["REG"],
            "stack": usage["STACK"],
            "shared": kernel.metadata.shared,
            "mma": mma,
        }
        | ({"tmem": tmem} if tmem else {})
        | ({"unsafe": unsafe[0]} if unsafe else {})
        | ({"misread": misreads} if misreads else {})
        | ({"contracted": contractions} if contractions else {})
    )


def misread(ptx: str) -> list[str]:
    """Registers of conversions to two FP8 numbers that are packed into a word and used by themselves too.

    ptxas 12.8 and 12.9, which come with Triton 3.6 and 3.9, convert straight into the word then, and the other use
    reads its register before anything is written to it.
    """
    pairs = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+(%rs\d+)")
    packed, alone = set[str](), set[str]()
    for line in map(str.strip, pairs.sub("", ptx).splitlines()):
        used = re.findall(r"%rs\d+", line)
        (packed if re.match(r"mov\.b(32|64)\s+%rd?\d+, {", line) else alone).update(used)
    return sorted(packed & alone & set(pairs.findall(ptx)))


def contracted(ptx: str) -> list[str]:
    """Registers with values of other lanes that a fused multiply-add adds a product to.

    Each lane then rounds the other's product but not its own, so the lanes of a row hold sums that differ, and race to
    store them. `device.reduce.mul_rn` rounds a product first.
    """
    given = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", ptx))
    added = set(re.findall(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+);", ptx))
    return sorted(given & added)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    return {
        k: int(v) for k, _, v in (field.partition(":") for field in line.split()) if v.isdigit()
    }


def problem_of(row: Row, result: dict[str, Any], release: str | None = None) -> str | None:
    """Why a row that a Triton compiled, by default the installed one, may not ship, or None."""
    if "note" in result:
        return None
    if result["shared"] > SHARED_LIMIT[row.arch]:
        return f"needs {result['shared']} bytes of shared memory of {SHARED_LIMIT[row.arch]}"
    if result.get("tmem", 0) > TMEM_LIMIT:
        return f"needs {result['tmem']} columns of tensor memory of {TMEM_LIMIT}"
    if "unsafe" in result:
        return f"converts to FP8 without saturation: {result['unsafe']}"
    if "misread" in result:
        return f"ptxas misreads conversions to FP8: {', '.join(result['misread'])}"
    if "contracted" in result:
        return f"adds products to what other lanes gave: {', '.join(result['contracted'])}"
    others = {} if (release or configs.triton_release()) == PINNED else SPILLS_OF_OTHERS
    if result["stack"] > (SPILLS_ALLOWED | others).get(row.kernel, (0, ""))[0]:
        return f"spills {result['stack']} bytes"
    return None


def table_path(release: str | None = None) -> Path:
    """The file of the rows that a Triton compiled, by default the installed one."""
    release = configs.triton_release() if release is None else release
    return Path(__file__).with_name("aot.json" if release == PINNED else f"aot_{release}.json")


def read_table(release: str | None = None) -> dict[str, dict[str, Any]]:
    """The committed rows by key."""
    path = table_path(release)
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def table_version(release: str | None = None) -> str:
    """The triton that compiled the table."""
    return str(json.loads(table_path(release).read_text())["triton"])


def write_table(table: dict[str, dict[str, Any]], sources: dict[str, str]) -> None:
    """One line a row, sorted, so that a change of one kernel is a small diff; sources: see `sources_of`."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    head = {"schema_version": 1, "triton": configs.versions()["triton"]}
    if configs.triton_release() != PINNED:
        head["sources"] = sources
    table_path().write_text(f'{json.dumps(head)[:-1]}, "rows": {{\n{lines}\n}}}}\n')


def sources_of(current: Iterable[Row]) -> dict[str, str]:
    """A hash of each kernel's source, by which another Triton's table is checked: only that release can print the
    layouts in its rows.
    """
    kernels = {row.kernel: row.launch.kernel for row in current if row.launch is not None}
    digest = {
        name: hashlib.sha256(source_of(kernel).encode()).hexdigest()[:16]
        for name, kernel in kernels.items()
    }
    return dict(sorted(digest.items()))


def stale(current: dict[str, Row], table: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Keys whose row is missing, changed or no longer wanted, with which of the three it is."""
    wrong = {k: "missing" for k in current if k not in table}
    for key, row in current.items():
        if key in table and (table[key]["hash"], table[key].get("note", "")) != (
            row.hash,
            row.note,
        ):
            wrong[key] = "changed"
    return wrong | {k: "unused" for k in table if k not in current}


def compile_all(work: list[Row], jobs: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Compile rows in ``jobs`` processes, results in order."""
    global _work
    _work = work
    if jobs <= 1:
        yield from ((row, compile_row(row)) for row in work)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from zip(
            work, pool.map(_compile_numbered, range(len(work)), chunksize=4), strict=True
        )


_work: list[Row] = []


def _compile_numbered(number: int) -> dict[str, Any]:
    return compile_row(_work[number])


def refresh(everything: bool, jobs: int) -> Iterator[tuple[int, int, Row, str | None]]:
    """Rebuild rows that are missing or changed (or all) and write the table.   -> number, total, row, its problem"""
    current, table = rows(), read_table()
    sources = sources_of(current.values())
    todo = list(current) if everything else [k for k in stale(current, table) if k in current]
    results = compile_all([current[k] for k in todo], jobs)
    for number, (row, result) in enumerate(results, 1):
        table[row.key] = result
        if number % 100 == 0:  # a rebuild that is cut off keeps what it has
            write_table(table, sources)
        yield number, len(todo), row, problem_of(row, result)
    write_table({k: table[k] for k in current}, sources)


class Check(NamedTuple):
    """A `Check` is the result of `check`.

    rows, compiled   numbers of rows in the table, and compiled now
    stale, problems  by row: why it is stale, and what is wrong with it
    """

    rows: int
    stale: dict[str, str]
    compiled: int
    problems: dict[str, str]


def check(sample: int, seed: int = 0, jobs: int = 1) -> Check:
    """Compare the committed table with the code, and compile a sample of it, stale rows first."""
    current, table = rows(), read_table()
    wrong = stale(current, table)
    others = sorted(set(current) - set(wrong))
    random.Random(seed).shuffle(others)
    todo = ([k for k in wrong if k in current] + others)[:sample]
    done = compile_all([current[k] for k in todo], jobs)
    problems = {row.key: problem_of(row, result) for row, result in done}
    return Check(len(current), wrong, len(todo), {k: p for k, p in problems.items() if p})
