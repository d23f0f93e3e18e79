"""What a machine can do: bandwidth of copies by size and direction, rates of arithmetic and memory.

Measured by `Hardware.measure()` (`fuseops env --measure`), or read from a file that it wrote. Where
no GPU is, plans are made for the shipped H200, and say so.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fuseops import torch_private
from fuseops.errors import FuseOpsError

SCHEMA_VERSION = 1
MIB = 1 << 20
SIZES = tuple(MIB << k for k in range(0, 9, 2))  # 1 MiB to 256 MiB
ROUNDS = 9
HOT = 0.15  # seconds until power limits the clock

# What scaled_dot_product_attention saves besides q, k, v and its output, by backend: name -> bytes
# for (batch, heads, queries, keys, bytes of an element). The dry run uses torch's CPU kernel, which
# saves the log-sum-exp as flash attention does.
ATTENTION_SAVES: Mapping[str, Mapping[str, Callable[[int, int, int, int, int], int]]] = {
    "flash": {
        "logsumexp": lambda b, h, q, k, e: 4 * b * h * q,
        "rng_state": lambda b, h, q, k, e: 16,
    },
    "cudnn": {
        "logsumexp": lambda b, h, q, k, e: 4 * b * h * q,
        "rng_state": lambda b, h, q, k, e: 16,
    },
    "efficient": {
        "logsumexp": lambda b, h, q, k, e: 4 * b * h * (-(-q // 32) * 32),
        "rng_state": lambda b, h, q, k, e: 16,
    },
    "math": {"probabilities": lambda b, h, q, k, e: e * b * h * q * k},
}


@dataclass(frozen=True)
class Curve:
    """Seconds of a copy by its size.

    points  (bytes, GB/s), sizes ascending; between them, and below the first, seconds grow linearly
            with bytes; beyond the last the bandwidth is the last one
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sorted(set(sizes)) != sizes or any(rate <= 0 for _, rate in self.points):
            raise FuseOpsError(
                "a bandwidth curve needs (bytes, GB/s) with ascending bytes and positive rates, "
                f"got {self.points}."
            )

    def seconds(self, nbytes: float) -> float:
        """Seconds to copy so many bytes in one piece."""
        if nbytes <= 0:
            return 0.0
        known = [(size, size / rate / 1e9) for size, rate in self.points]
        size, took = known[-1]
        if nbytes >= size or len(known) == 1:
            return took * nbytes / size
        (low, start), (high, end) = known[:2]
        # The latency of a copy: where the first stretch meets no bytes, if noise lets it.
        latency = max(start - (end - start) * low / (high - low), start / 8)
        known.insert(0, (0, min(latency, start)))
        above = next(k for k, (size, _) in enumerate(known) if nbytes <= size)
        (low, start), (high, end) = known[above - 1], known[above]
        return start + (end - start) * (nbytes - low) / (high - low)

    @property
    def peak(self) -> float:
        """GB/s of large copies."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Hardware:
    """A machine, for the planner.

    d2h, h2d     one direction alone
    both         both at once: the sum of the two rates
    memory       GB/s of the device's own memory, read plus written
    matmul       TFLOP/s of matrix products by dtype; other dtypes are taken as float32's
                 after so many products that power is what limits them, as in training
    transposing  GB/s, read plus written, of a copy to another order of axes; 0: as memory
    launch       seconds that the smallest kernel takes
    device_bytes memory of the device; 0: unknown
    arch         compute capability as one number, 90 on Hopper; 0: kernels as on the device at hand
    attention_rate TFLOP/s of causal scaled_dot_product_attention, forward and backward together, what
                 it masks not counted, after as many; 0: as matrix products
    attention    backend of scaled_dot_product_attention, a key of ATTENTION_SAVES
    source       where the figures come from
    """

    name: str
    d2h: Curve
    h2d: Curve
    both: Curve
    memory: float
    matmul: Mapping[str, float] = field(default_factory=dict)
    transposing: float = 0.0
    launch: float = 0.0
    device_bytes: int = 0
    arch: int = 0
    attention_rate: float = 0.0
    attention: str = "flash"
    source: str = "given"

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_SAVES:
            raise FuseOpsError(
                f"Hardware(attention=...) expects one of {', '.join(ATTENTION_SAVES)}, "
                f"got {self.attention!r}."
            )

    def copy_seconds(self, lane: str, nbytes: int, *, duplex: bool = False) -> float:
        """Seconds of one copy on lane "d2h" or "h2d". duplex: while the other one is busy too."""
        alone = (self.d2h if lane == "d2h" else self.h2d).seconds(nbytes)
        # Each direction's share of the two-way rate, never better than alone.
        return max(alone, 2 * self.both.seconds(nbytes)) if duplex else alone

    def slower(self, factor: float) -> Hardware:
        """A machine whose copies take `factor` times as long."""
        d2h, h2d, both = (
            Curve(tuple((size, rate / factor) for size, rate in curve.points))
            for curve in (self.d2h, self.h2d, self.both)
        )
        return replace(self, d2h=d2h, h2d=h2d, both=both)

    def with_link(self, rate: float) -> Hardware:
        """A machine whose copies of any size run at `rate` GB/s each way, both ways at once too."""
        one, both = Curve(((1, rate),)), Curve(((1, 2 * rate),))
        return replace(self, d2h=one, h2d=one, both=both)

    def op_seconds(
        self,
        flops: float,
        nbytes: int,
        dtype: str,
        *,
        attention: bool = False,
        transposing: bool = False,
    ) -> float:
        """A roofline with a round corner: where arithmetic and bytes take alike, neither hides the
        other wholly (grouped GEMMs on an H200 took what the root of the sum of squares says).
        """
        matmul = self.matmul.get(dtype) or self.matmul.get("float32") or 0.0
        rate = (self.attention_rate if attention else 0.0) or matmul
        arithmetic = flops / (rate * 1e12) if rate else 0.0
        memory = (self.transposing if transposing else 0.0) or self.memory
        return self.launch + math.hypot(arithmetic, nbytes / (memory * 1e9))

    # --- files

    def to_json(self) -> dict[str, Any]:
        """Plain data with a schema_version; `from_json` reads it."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for name in ("d2h", "h2d", "both"):
            data[name] = [list(point) for point in data[name]["points"]]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hardware:
        """Raises FuseOpsError for data of another version or with fields missing."""
        version = data.get("schema_version")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if version != SCHEMA_VERSION or not {"name", "d2h", "h2d", "both", "memory"} <= set(values):
            raise FuseOpsError(
                f"a hardware profile has schema_version {SCHEMA_VERSION} and at least name, d2h, "
                f"h2d, both and memory; got version {version!r} with {sorted(values)}. "
                "`fuseops env --measure --json` writes one."
            )
        for name in ("d2h", "h2d", "both"):
            values[name] = Curve(tuple((int(size), float(rate)) for size, rate in values[name]))
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """A profile from a file: of `to_json`, or all that `fuseops env --measure --json` printed.

        Raises FuseOpsError when it is no such file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FuseOpsError(f"cannot read a hardware profile from {path}: {error}") from None
        return cls.from_json(data.get("measured", data) if isinstance(data, dict) else {})

    # --- where profiles come from

    @classmethod
    def h200(cls) -> Hardware:
        """One NVIDIA H200 as measured for this project, on one machine."""
        return cls.load(Path(__file__).with_name("hardware_h200.json"))

    @classmethod
    def measure(cls) -> Hardware:
        """Measure this machine's CUDA device, in about five seconds.

        Raises FuseOpsError where torch sees no CUDA device.
        """
        if not torch.cuda.is_available():
            raise FuseOpsError(
                "Hardware.measure() needs a CUDA device, and torch sees none. "
                "Hardware.h200() is a shipped profile, Hardware.load(path) reads a measured one."
            )
        here = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch = 10 * here.major + here.minor
        attention_rate, attention = _attention()
        return cls(
            here.name,
            *_copy_curves(),
            memory=_memory_rate(),
            matmul={str(d).removeprefix("torch."): _matmul_rate(d) for d in _matmul_dtypes(arch)},
            device_bytes=here.total_memory,
            arch=arch,
            transposing=_transposing_rate(),
            launch=_launch_seconds(),
            attention_rate=attention_rate,
            attention=attention,
            source=f"measured, torch {torch.__version__}",
        )


def _copy_curves() -> tuple[Curve, Curve, Curve]:
    """Bandwidth out, back and both ways at once, over SIZES."""
    points: dict[str, list[tuple[int, float]]] = {"d2h": [], "h2d": [], "both": []}
    out, back = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for size in SIZES:
        device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        repeat = max(2, (256 * MIB) // size)  # back to back, as a schedule queues them

        def down(device: list[torch.Tensor] = device, host: list[torch.Tensor] = host) -> None:
            host[0].copy_(device[0], non_blocking=True)

        def up(device: list[torch.Tensor] = device, host: list[torch.Tensor] = host) -> None:
            device[1].copy_(host[1], non_blocking=True)

        for name, works in (
            ("d2h", ((out, down),)),
            ("h2d", ((back, up),)),
            ("both", ((out, down), (back, up))),
        ):
            seconds = _seconds(works, repeat)
            points[name].append((size, _digits(len(works) * size / seconds / 1e9)))
    out_alone, back_alone, both = (Curve(tuple(curve)) for curve in points.values())
    return out_alone, back_alone, both


def _memory_rate() -> float:
    """GB/s of a device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    works = ((torch.cuda.current_stream(), lambda: target.copy_(source)),)
    return _digits(2 * source.numel() / _seconds(works, 2) / 1e9)


def _matmul_dtypes(arch: int) -> tuple[torch.dtype, ...]:
    fp8 = (torch.float8_e4m3fn,) if arch >= 89 else ()
    return (torch.bfloat16, torch.float16, torch.float32, *fp8)


def _matmul_rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a square product of random data."""
    n = 2048 if dtype is torch.float32 else 8192
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def work() -> torch.Tensor:
        if dtype is not torch.float8_e4m3fn:
            return torch.mm(a, b)
        return torch.ops.aten._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return _digits(2 * n**3 / _hot_seconds(work) / 1e12)


def _transposing_rate() -> float:
    """GB/s of queries from (batch, heads, tokens, width) to (batch, tokens, heads, width)."""
    source = torch.randn(8, 16, 4096, 128, device="cuda").to(torch.bfloat16).transpose(1, 2)
    works = ((torch.cuda.current_stream(), source.contiguous),)
    return _digits(2 * source.nbytes / _seconds(works, 10) / 1e9)


def _launch_seconds() -> float:
    """Of kernels that wait for each other, and not for the host."""
    kernels = 200
    one, start, stop = torch.ones((), device="cuda"), event(), event()
    for lead in (0, 20_000 * kernels):  # cycles, about 10 us each; the first warms up
        torch_private.occupy_device(lead)
        start.record()
        for _ in range(kernels):
            one.add_(1)
        stop.record()
        stop.synchronize()
    return _digits(start.elapsed_time(stop) / kernels / 1e3)


def _attention() -> tuple[float, str]:
    """TFLOP/s of causal attention, forward and backward, and the backend that torch chose for it."""
    shape = batch, heads, tokens, width = (8, 8, 4096, 128)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    dy = torch.randn_like(q)

    def work() -> None:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), dy)

    flops = (4 + 10) * batch * heads * tokens**2 * width / 2
    rate = _digits(flops / _hot_seconds(work) / 1e12)
    node = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).grad_fn
    chosen = "" if node is None else node.name().lower()
    return rate, next((name for name in ATTENTION_SAVES if name in chosen), "math")


Work = tuple[torch.cuda.Stream, Callable[[], object]]


def _seconds(works: tuple[Work, ...], repeat: int) -> float:
    """Seconds of one call of each work, all streams at once: the median of ROUNDS of `repeat`."""
    rounds = []
    main = torch.cuda.current_stream()
    for _ in range(ROUNDS + 2):  # the first two warm up
        start, stop = (event() for _ in range(2))
        main.synchronize()
        main.record_event(start)
        for stream, work in works:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(repeat):
                    work()
        for stream, _ in works:
            main.wait_stream(stream)
        main.record_event(stop)
        stop.synchronize()
        rounds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(rounds[2:]) / repeat


def _hot_seconds(work: Callable[[], object]) -> float:
    """Seconds of one call once the device is as hot as in training: HOT seconds of calls before it."""
    repeat = max(2, int(HOT / _seconds(((torch.cuda.current_stream(), work),), 1)))
    start, stop = event(), event()
    for mark in (stop, start):  # all the same without a pause, but only the second time counts
        mark.record()
        for _ in range(repeat):
            work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeat / 1e3


def event() -> torch.cuda.Event:
    """One that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _digits(value: float) -> float:
    """Four of them."""
    return float(f"{value:.4g}")
