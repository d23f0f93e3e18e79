"""What the model's plans say, in short."""

from collections.abc import Iterator, Sequence

from fuseops.explain.layout import groups, miss_rows
from fuseops.plan.records import Planned


def lines(found: Sequence[Planned]) -> Iterator[str]:
    """The plan in short: what fused and what did not, equal Sequentials once."""
    for group in groups([plan for plan in found if plan.forward]):
        yield f"  {group.title}"
        fused = set(group.plan.fused)
        for span in group.plan.fused:
            yield f"    fused      {span} ({span.kind})"
        alone = [str(s) for s in group.plan.forward if s not in fused and s.kind == "op"]
        if alone:
            yield f"    alone      {', '.join(alone)}"
        for rules, where, why in miss_rows(group.plan):
            yield f"    not fused  {rules} at {where}: {why}"
