"""What the offload benchmark says: progress, tables."""

from __future__ import annotations

import statistics
import time
from typing import Any

from measure import paired

from fuseops.offload import OffloadPlan

START = time.perf_counter()
GIB = 1 << 30

Row = dict[str, float]  # what a visit of a way found


def summary(
    mine: list[Row], base: list[Row], plan: OffloadPlan | None, before: int
) -> dict[str, Any]:
    """Of one way over its rounds, beside the plain step of the same rounds.

    plan    that it followed; before: bytes on the device before a step
    """
    found: dict[str, Any] = {
        "rounds": len(mine),
        **paired([r["ms"] for r in base], [r["ms"] for r in mine]),
        "ms": statistics.median(r["ms"] for r in mine),
        "peak_gib": max(r["peak_gib"] for r in mine),
        "resident_gib": mine[-1]["resident_gib"],
    }
    return found if plan is None else found | beside_plan(plan, found, mine[-1], base[-1], before)


def beside_plan(
    plan: OffloadPlan, found: dict[str, Any], mine: Row, base: Row, before: int
) -> dict[str, Any]:
    """What was predicted, and how near it came."""
    lower = base["peak_gib"] - found["peak_gib"]
    wanted = plan.before.peak - plan.after.peak
    rest = {
        "moved_gib": mine["moved_gib"],
        "predicted": {
            "before_gib": (plan.before.peak - before) / GIB,
            "peak_gib": (plan.after.peak - before) / GIB,
            "ms": plan.after.seconds * 1e3,
            "ratio": plan.after.seconds / plan.before.seconds,
            "stall_ms": plan.after.stall * 1e3,
            "lag": plan.settings.lag,
            "offload_gib": plan.bytes_of("offload") / GIB,
            "recomputed": list(plan.recomputed),
            "warnings": list(plan.warnings),
        },
        "lower_over_predicted": lower * GIB / max(wanted, 1),
        "peak_error": found["peak_gib"] * GIB / max(plan.after.peak - before, 1) - 1,
        "time_error": found["ms"] / 1e3 / plan.after.seconds - 1,
    }
    if mine["moved_gib"] and not plan.recomputed:
        rest["gone_over_moved"] = lower / mine["moved_gib"]
    return rest


SLOWER = {"plan 12.8 GiB": 1.015, "plan 11 GiB": 1.06, "plan carried": 1.008}  # at most


def bars(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the plans are held to, of the parts that ran: what was found, the bar, whether it is met."""
    found: dict[str, dict[str, Any]] = {}

    def at_most(what: str, value: float, bar: float) -> None:
        found[what] = {"found": value, "at most": bar, "met": value <= bar}

    def at_least(what: str, value: float, bar: float) -> None:
        found[what] = {"found": value, "at least": bar, "met": value >= bar}

    rounds = record.get("rounds", {})
    for way, row in rounds.items():
        if way in SLOWER:
            at_most(f"{way}: ratio, upper end of the interval", row["interval"][1], SLOWER[way])
        if "predicted" not in row:
            continue
        at_most(f"{way}: peak beside the prediction", abs(row["peak_error"]), 0.01)
        at_most(f"{way}: time beside the prediction", abs(row["time_error"]), 0.05)
        at_least(f"{way}: lower peak over the prediction", row["lower_over_predicted"], 0.997)
        if "gone_over_moved" in row:
            at_least(f"{way}: bytes gone over bytes chosen", row["gone_over_moved"], 0.999)
    if "plan carried" in rounds:
        row = rounds["plan carried"]
        at_most("plan carried: host over device, of a step", row["host_ms"] / row["ms"], 0.6)
        at_most("plan carried: us of the host a saved tensor", row["host_us_a_tensor"], 25)
        chosen = row["predicted"]["offload_gib"]
        carried = record["plans"]["carried_at_55_gbs_gib"]
        at_least("plan carried: GiB chosen over those that 55 GB/s carry for free", chosen, carried)
    others = record.get("others", {})
    if "plan 7 GiB" in rounds and "checkpoint" in others:
        at_most(
            "plan 7 GiB: ms, less than checkpoint of every block",
            rounds["plan 7 GiB"]["ms"],
            others["checkpoint"]["ms"],
        )
    return found


def say(what: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {what}", flush=True)


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'way':20}{'ms':>9}{'host':>8}{'ratio':>8}{'interval':>16}{'peak':>7}{'moved':>7}"]
    for way, row in found.items():
        spread = "{:.4f}-{:.4f}".format(*row["interval"]) if "interval" in row else ""
        lines.append(
            f"{way:20}{row['ms']:9.2f}{row.get('host_ms', 0):8.1f}{row.get('ratio', 0):8.4f}{spread:>16}"
            f"{row.get('peak_gib', 0):7.2f}{row.get('moved_gib', 0):7.2f}"
        )
        if "predicted" in row:
            guess = row["predicted"]
            lines[-1] += (
                f"  predicted {guess['peak_gib']:.2f} GiB ({row['peak_error']:+.4f}), "
                f"{guess['ms']:.2f} ms ({row['time_error']:+.4f}), {guess['ratio']:.4f}; "
                f"{len(guess['recomputed'])} recomputed; lower {row['lower_over_predicted']:.4f}, "
                f"gone {row.get('gone_over_moved', 0):.4f}"
            )
    return "\n".join(lines)
