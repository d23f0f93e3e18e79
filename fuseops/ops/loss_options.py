"""`LossOptions` holds and checks the options of `LinearCrossEntropy`."""

from typing import NamedTuple

from fuseops.arguments import check_integers, is_number, shown
from fuseops.errors import FuseOpsError

CHUNK_BYTES = 512 << 20
IGNORED = -100  # the default ignore_index of torch's losses
LOGITS_STAY_HIGH = "what is rounded in logits is an error of every probability and gradient"
ROWS = ("lse", "log_probs", "entropy")
"""The numbers of each token that the loss publishes on request."""


class LossOptions(NamedTuple):
    """`LossOptions` hold the options of the loss of a `LinearCrossEntropy` or `linear_cross_entropy`."""

    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    temperature: float = 1.0
    reduction: str = "mean"
    publishes: tuple[str, ...] = ()
    gradients: str | None = None
    chunk_bytes: int = CHUNK_BYTES

    @property
    def is_scalar(self) -> bool:
        """Whether the only differentiable output is a scalar loss."""
        return self.reduction != "none" and not self.publishes

    @property
    def gradient_pass(self) -> str:
        """The pass that computes the gradients: as requested, by default "forward" for a scalar loss."""
        return self.gradients or ("forward" if self.is_scalar else "backward")

    @property
    def kernel_options(self) -> list[float]:
        """The options of the kernels: label_smoothing, z_loss, soft_cap (0 for none), temperature."""
        return [self.label_smoothing, self.z_loss, self.soft_cap or 0.0, self.temperature]

    def check(self) -> None:
        """Raise FuseOpsError for an option out of its range."""
        cap, smoothing, published = self.soft_cap, self.label_smoothing, self.publishes
        known = isinstance(published, (tuple, list)) and all(name in ROWS for name in published)
        once = known and len({*published}) == len(published)
        ways = '"forward", "backward" or None'
        fits = {
            "reduction": (self.reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"'),
            "label_smoothing": (is_number(smoothing) and 0 <= smoothing <= 1, "a fraction"),
            "z_loss": (is_number(self.z_loss), "a finite number"),
            "soft_cap": (cap is None or (is_number(cap) and cap > 0), "above zero, or None"),
            "temperature": (is_number(self.temperature) and self.temperature > 0, "above zero"),
            "publishes": (once, f"names among {ROWS}, each once"),
            "gradients": (self.gradients in (None, "forward", "backward"), ways),
        }
        check_integers("LinearCrossEntropy", ignore_index=self.ignore_index)
        check_integers("LinearCrossEntropy", 1, chunk_bytes=self.chunk_bytes)
        for name, (fine, wanted) in fits.items():
            if not fine:
                raise FuseOpsError(
                    f"LinearCrossEntropy got {name}={shown(getattr(self, name))}: {wanted}."
                )
        if self.gradients == "forward" and not self.is_scalar:
            raise FuseOpsError(
                'gradients="forward" needs a loss that is one number, and nothing published: the gradient of each '
                'token\'s is not known before the backward. Leave it out, or take reduction="mean" or "sum".'
            )
