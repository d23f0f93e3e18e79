"""What the loss of a head is told: options of `LinearCrossEntropy`, checked in one place."""

from typing import NamedTuple

from fuseops.errors import FuseOpsError

from .checks import check_integers, is_number

ROWS = ("lse", "log_probs", "entropy")
"""What the loss publishes of every token, on request."""


class LossOptions(NamedTuple):
    """What `LinearCrossEntropy` and `linear_cross_entropy` are told of the loss."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    temperature: float
    reduction: str
    publishes: tuple[str, ...]
    gradients: str | None
    chunk_bytes: int

    def check(self) -> None:
        """Raise FuseOpsError for an option that means nothing."""
        cap, smoothing, published = self.soft_cap, self.label_smoothing, self.publishes
        known = not isinstance(published, str) and {*published} <= {*ROWS}
        ways = '"forward", "backward" or None'
        fits = {
            "reduction": (self.reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"'),
            "label_smoothing": (is_number(smoothing) and 0 <= smoothing <= 1, "a fraction"),
            "z_loss": (is_number(self.z_loss), "a finite number"),
            "soft_cap": (cap is None or (is_number(cap) and cap > 0), "above zero, or None"),
            "temperature": (is_number(self.temperature) and self.temperature > 0, "above zero"),
            "publishes": (known, f"names among {ROWS}"),
            "gradients": (self.gradients in (None, "forward", "backward"), ways),
            "chunk_bytes": (
                is_number(self.chunk_bytes) and self.chunk_bytes >= 1,
                "a number of bytes",
            ),
        }
        check_integers("LinearCrossEntropy", ignore_index=self.ignore_index)
        for name, (fine, wanted) in fits.items():
            if not fine:
                raise FuseOpsError(
                    f"LinearCrossEntropy got {name}={getattr(self, name)!r}: {wanted}."
                )
