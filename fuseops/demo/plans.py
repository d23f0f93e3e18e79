"""What the model's plans say, in the form that the demo shows: counts, a short text, drawings."""

from collections.abc import Iterator, Sequence
from html import escape

from torch import Tensor, nn

from fuseops.explain import FusionPlan, plans
from fuseops.explain.html import fragment
from fuseops.explain.layout import groups, place
from fuseops.plan.records import Miss, Planned
from fuseops.words import plural


def plans_of(model: nn.Module, text: Tensor) -> list[FusionPlan]:
    """The plan of every Sequential in one forward; their saved bytes add up to the model's."""
    return plans(model, text)


def fused_spans(found: Sequence[FusionPlan]) -> int:
    """How many spans a rule made."""
    return sum(len(plan.fused) for top in found for plan in top.walk())


def saved_bytes(found: Sequence[FusionPlan]) -> int:
    """Bytes that the whole forward keeps for the backward, beyond the parameters."""
    return sum(plan.saved_bytes for plan in found)


def lines(found: Sequence[FusionPlan]) -> Iterator[str]:
    """The plan in short: what fused and what did not, equal Sequentials once."""
    for group in groups([plan for plan in found if plan.forward]):
        yield f"  {group.title}"
        fused = set(group.plan.fused)
        for span in group.plan.fused:
            yield f"    fused      {span} ({span.kind})"
        alone = [str(s) for s in group.plan.forward if s not in fused and s.kind == "op"]
        if alone:
            yield f"    alone      {', '.join(alone)}"
        yield from (f"    not fused  {text}" for text in _not_fused(group.plan))


def _not_fused(plan: Planned) -> Iterator[str]:
    """Why ops that run alone did not fuse; rules that say the same of one place share a line."""
    same: dict[tuple[str, str], list[Miss]] = {}
    for miss in plan.misses:
        start, stop = miss.span
        if not any(s.start <= start and stop <= s.stop for s in plan.fused):
            key = place(plan, miss), miss.reason.partition(",")[0]
            same.setdefault(key, []).append(miss)
    for (where, short), misses in same.items():
        rules = ", ".join(miss.rule for miss in misses)
        yield f"{rules} at {where}: {short if len(misses) > 1 else misses[0].reason}"


def drawings(found: Sequence[FusionPlan]) -> str:
    """HTML of every plan, equal ones once."""
    parts = []
    for group in groups(found):
        parts.append(fragment([group.plan]))
        if others := group.paths[1:]:
            parts.append(f"<p>{plural(len(others), 'equal plan')}: {escape(', '.join(others))}</p>")
    return "\n".join(parts)
