"""Hardware profiles: bandwidth of copies by size and direction, rates of arithmetic and memory.

They are measured by `Hardware.measure()` (`fuseops env --measure`), or read from a file that it wrote. Without a GPU,
plans are made for the shipped H200, and say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from fuseops.arguments import (
    as_path,
    check_flags,
    check_integers,
    check_numbers,
    check_positive,
    instance_of,
    is_number,
    is_one_of,
    several,
    shown,
)
from fuseops.errors import FuseOpsError
from fuseops.offload.codes import traffic
from fuseops.words import dtype_name, plural

from . import measure

SCHEMA_VERSION = 1
COPY_LANES = ("d2h", "h2d")

# What scaled_dot_product_attention saves besides q, k, v and its output, by backend. The dry run uses torch's CPU
# kernel, which saves the log-sum-exp as flash attention does.
ATTENTION_SAVES: Mapping[str, tuple[str, ...]] = {
    "flash": ("logsumexp", "rng_state"),
    "cudnn": ("logsumexp", "rng_state"),
    "efficient": ("logsumexp", "rng_state"),
    "math": ("probabilities",),
}


@dataclass(frozen=True)
class Curve:
    """A `Curve` gives the seconds that a copy takes, by its bytes.

    points  (bytes, GB/s), sizes ascending; between them, and below the first, seconds grow linearly
            with bytes; beyond the last the bandwidth is the last one
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        fine = all(
            isinstance(point, Sequence) and len(point) == 2 and all(map(is_number, point))
            for point in several(self.points, object, "Curve(points)", "pairs (bytes, GB/s)")
        )
        sizes = [size for size, _ in self.points] if fine else []
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
        # The latency of a copy: the first segment extrapolated to 0 bytes, within bounds for noise.
        latency = max(start - (end - start) * low / (high - low), start / 8)
        known.insert(0, (0, min(latency, start)))
        above = next(k for k, (size, _) in enumerate(known) if nbytes <= size)
        (low, start), (high, end) = known[above - 1], known[above]
        return start + (end - start) * (nbytes - low) / (high - low)

    @property
    def peak(self) -> float:
        """GB/s of large copies."""
        return self.points[-1][1]

    @classmethod
    def lowest(cls, curves: Sequence[Curve]) -> Curve:
        """At every size the lowest rate of some curves.  Raises FuseOpsError unless they have the same sizes."""
        sizes = {tuple(size for size, _ in curve.points) for curve in curves}
        if len(sizes) != 1:
            raise FuseOpsError(f"bandwidth curves over other sizes have no lowest: {sizes}.")
        return cls(
            tuple(
                (at[0][0], min(rate for _, rate in at))
                for at in zip(*(c.points for c in curves), strict=True)
            )
        )


@dataclass(frozen=True)
class Hardware:
    """A `Hardware` holds the rates of a machine that the planner predicts from.

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
    network      GB/s that a rank sends to others while all of them do; 0: unknown, and then it takes no time
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
    network: float = 0.0
    attention: str = "flash"
    source: str = "given"

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"str": str, "Curve": Curve, "float": (int, float), "int": int}
        for f in fields(self):
            said = str(f.type)
            kind, value = kinds.get(said, Mapping), getattr(self, f.name)
            instance_of(value, kind, f"Hardware({f.name}=...)", said)
            if said == "float":
                check_numbers("Hardware", 0, **{f.name: value})
            elif said == "int":
                check_integers("Hardware", 0, **{f.name: value})
        for dtype, rate in self.matmul.items():
            instance_of(dtype, str, "Hardware(matmul=...)", "rates by dtype, {'bfloat16': TFLOP/s}")
            check_numbers(f"Hardware(matmul=...), of {dtype},", 0, rate=rate)
        if self.attention not in ATTENTION_SAVES:
            raise FuseOpsError(
                f"Hardware(attention=...) expects one of {', '.join(ATTENTION_SAVES)}, "
                f"got {shown(self.attention)}."
            )

    def copy_seconds(self, lane: str, nbytes: float, *, duplex: bool = False) -> float:
        """Seconds of one copy on lane "d2h" or "h2d". duplex: while the other one is busy too."""
        if not is_one_of(lane, COPY_LANES):
            known = " or ".join(map(repr, COPY_LANES))
            raise FuseOpsError(f"copy_seconds(lane, ...) expects {known}, got {shown(lane)}.")
        check_numbers("Hardware.copy_seconds", 0, nbytes=nbytes)
        check_flags("Hardware.copy_seconds", duplex=duplex)
        return self._copy_seconds(lane, nbytes, duplex)

    def _copy_seconds(self, lane: str, nbytes: float, duplex: bool) -> float:
        """`copy_seconds`, for a plan's many copies: nothing is checked."""
        alone = (self.d2h if lane == "d2h" else self.h2d).seconds(nbytes)
        # Each direction's share of the two-way rate, never better than alone.
        return max(alone, 2 * self.both.seconds(nbytes)) if duplex else alone

    def lane_seconds(self, lane: str, cost: float, duplex: bool) -> float:
        """Seconds of an op on a lane, whose cost is bytes on the copy lanes and seconds elsewhere (`Lanes.op`)."""
        return self._copy_seconds(lane, int(cost), duplex) if lane in COPY_LANES else cost

    def slower(self, factor: float) -> Hardware:
        """A machine whose copies take `factor` times as long.  Raises FuseOpsError for a factor that is not above 0."""
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise FuseOpsError(
                f"slower(factor) expects a finite number above 0, got {shown(factor)}."
            )
        d2h, h2d, both = (
            Curve(tuple((size, rate / factor) for size, rate in curve.points))
            for curve in (self.d2h, self.h2d, self.both)
        )
        return replace(self, d2h=d2h, h2d=h2d, both=both)

    def with_link(self, rate: float) -> Hardware:
        """A machine whose copies of any size run at `rate` GB/s each way, both ways at once too."""
        check_positive("Hardware.with_link", rate=rate)
        one, both = Curve(((1, rate),)), Curve(((1, 2 * rate),))
        return replace(self, d2h=one, h2d=one, both=both)

    def op_seconds(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        *,
        attention: bool = False,
        transposing: bool = False,
    ) -> float:
        """A roofline with a round corner: where arithmetic and bytes take similar times, neither hides the other
        wholly. The root of the sum of squares fits grouped GEMMs on an H200.
        """
        check_numbers("Hardware.op_seconds", 0, flops=flops, nbytes=nbytes)
        instance_of(dtype, str, "Hardware.op_seconds(dtype)", "the name of a dtype, 'bfloat16'")
        check_flags("Hardware.op_seconds", attention=attention, transposing=transposing)
        matmul = self.matmul.get(dtype) or self.matmul.get("float32") or 0.0
        rate = (self.attention_rate if attention else 0.0) or matmul
        arithmetic = flops / (rate * 1e12) if rate else 0.0
        memory = (self.transposing if transposing else 0.0) or self.memory
        return self.launch + math.hypot(arithmetic, nbytes / (memory * 1e9))

    def coding_seconds(self, nbytes: int, codes: int) -> tuple[float, float]:
        """Seconds to encode a storage, and to decode it: passes over device memory, with two launches each."""
        check_integers("Hardware.coding_seconds", 0, nbytes=nbytes, codes=codes)
        rate = self.memory * 1e9
        write, read = (2 * self.launch + moved / rate for moved in traffic(nbytes, codes))
        return write, read

    def network_seconds(self, nbytes: float) -> float:
        """Seconds in which a rank sends so many bytes to others."""
        check_numbers("Hardware.network_seconds", 0, nbytes=nbytes)
        return nbytes / (self.network * 1e9) if self.network else 0.0

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
        instance_of(data, Mapping, "Hardware.from_json(data)", "a mapping, as to_json() gives it")
        version = data.get("schema_version")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if version != SCHEMA_VERSION or not {"name", "d2h", "h2d", "both", "memory"} <= set(values):
            raise FuseOpsError(
                f"Hardware.from_json(data): a hardware profile has schema_version {SCHEMA_VERSION} and at least name, "
                f"d2h, h2d, both and memory; got version {version!r} with {sorted(values)}. "
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
        file = as_path(path, "Hardware.load(path)")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FuseOpsError(
                f"Hardware.load(path): cannot read a hardware profile from {path}: {error}"
            ) from None
        return cls.from_json(data.get("measured", data) if isinstance(data, dict) else {})

    # --- sources of profiles

    @classmethod
    def h200(cls) -> Hardware:
        """One NVIDIA H200 as measured for this project, on one machine."""
        return cls.load(Path(__file__).with_name("hardware_h200.json"))

    @classmethod
    def measure(cls, group: dist.ProcessGroup | None = None) -> Hardware:
        """Measure this machine's CUDA device, in about five seconds.

        group  all ranks of it measure together, copy at the same time, and get the `slowest` of what they found: one
               profile, so that they plan alike
        Raises FuseOpsError where torch sees no CUDA device.
        """
        instance_of(group, (dist.ProcessGroup, NoneType), "measure(group)", "a process group")
        if not torch.cuda.is_available():
            raise FuseOpsError(
                "Hardware.measure() needs a CUDA device, and torch sees none. "
                "Hardware.h200() is a shipped profile, Hardware.load(path) reads a measured one."
            )
        here = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch = 10 * here.major + here.minor
        attention_rate, node = measure.attention_rate()
        meet = partial(dist.barrier, group) if group is not None else lambda: None
        d2h, h2d, both = (Curve(points) for points in measure.copy_rates(meet).values())
        mine = cls(
            *(here.name, d2h, h2d, both),
            memory=measure.memory_rate(),
            matmul={dtype_name(d): measure.matmul_rate(d) for d in measure.matmul_dtypes(arch)},
            device_bytes=here.total_memory,
            arch=arch,
            transposing=measure.transposing_rate(),
            launch=measure.launch_seconds(),
            attention_rate=attention_rate,
            attention=next((name for name in ATTENTION_SAVES if name in node), "math"),
            source=f"measured, torch {torch.__version__}",
        )
        if group is None:
            return mine
        mine = replace(mine, network=measure.network_rate(group))
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group)
        return cls.slowest(found)

    @classmethod
    def slowest(cls, found: Sequence[Hardware]) -> Hardware:
        """The lowest rates of several profiles.   found: one or more, measured over the same sizes

        Raises FuseOpsError for none, and for curves over other sizes.
        """
        found = several(found, Hardware, "slowest(found)", "profiles, each an offload.Hardware")
        if not found:
            raise FuseOpsError("slowest(found) expects one profile or more, got none.")
        first = found[0]
        rates: dict[str, Any] = {
            name: Curve.lowest([getattr(h, name) for h in found]) for name in ("d2h", "h2d", "both")
        }
        for name in ("memory", "transposing", "attention_rate", "network", "device_bytes"):
            rates[name] = min(getattr(h, name) for h in found)
        dtypes = [d for d in first.matmul if all(d in h.matmul for h in found)]
        rates["matmul"] = {d: min(h.matmul[d] for h in found) for d in dtypes}
        rates["launch"] = max(h.launch for h in found)
        together = f"{first.source}, the slowest of {plural(len(found), 'rank')} at the same time"
        return replace(first, **rates, source=together)
