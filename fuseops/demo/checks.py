"""What the demo proves on its own model: fused equals unfused, offloaded equals resident."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import offload
from fuseops.explain import explain
from fuseops.explain.layout import fused_and_missed
from fuseops.run.config import fusion
from fuseops.words import plural, size

from .model import ByteModel, objective

MIN_BYTES = 1 << 16  # of a tensor worth moving: activations, not statistics and indices

# Of the largest value of each tensor. float32: another order of sums, through a few layers. A GPU
# computes in bfloat16, whose own rounding is 2^-8.
TOLERANCE = {"cpu": 2e-5, "cuda": 4e-2}


class Results(NamedTuple):
    """`Results` hold the loss and the gradients of one forward and backward."""

    tensors: dict[str, Tensor]  # logits, loss, gradient of every parameter
    chosen: tuple[Tensor, ...]  # experts of every token


class StepDifference(NamedTuple):
    """A `StepDifference` is the largest difference between two results, in units of the largest value of its tensor."""

    where: str
    relative: float


class Checked(NamedTuple):
    """A `Checked` holds what the checks found."""

    fused_spans: int
    fusion: StepDifference
    tolerance: float
    offloaded_bytes: int
    offload_unequal: tuple[str, ...]  # tensors that are not equal bit for bit
    saved_unfused: int
    saved_fused: int

    @property
    def saved_offloaded(self) -> int:
        """Saved bytes that stay on the device."""
        return self.saved_fused - self.offloaded_bytes

    def verdicts(self) -> Iterator[tuple[bool, str]]:
        """(passed, sentence) for each thing that was to be shown."""
        worst = self.fusion.relative
        where = f" in the {self.fusion.where}" * bool(self.fusion.where)
        yield (
            worst <= self.tolerance,
            f"fused equals unfused: outputs and all gradients differ by at most {worst:.1e} of a tensor's largest "
            f"value{where} (allowed {self.tolerance:.0e})",
        )
        unequal = f", but for {', '.join(self.offload_unequal)}" if self.offload_unequal else ""
        yield not unequal, f"offloaded equals resident, bit for bit{unequal}"
        yield self.fused_spans > 0, plural(self.fused_spans, "span") + " fused"
        moved = self.offloaded_bytes
        yield moved > 0, f"{size(moved)} ({moved} bytes) offloaded"


def forward_backward(
    model: ByteModel,
    text: Tensor,
    chosen: Sequence[Tensor] | None = None,
    scope: AbstractContextManager[object] | None = None,
) -> Results:
    """Outputs and all gradients of one batch; `scope` is open during the model's forward."""
    model.zero_grad(set_to_none=True)
    with scope or nullcontext():
        out = model(text[:, :-1], chosen)
    loss = objective(out, text, model.config.balance)
    loss.backward()
    tensors = {"logits": out.logits.detach(), "loss": loss.detach()}
    for name, p in model.named_parameters():
        # a parameter without a gradient compares as one full of NaN: it must not pass for equal
        tensors[f"gradient of {name}"] = torch.full_like(p, torch.nan) if p.grad is None else p.grad
    model.zero_grad(set_to_none=True)
    return Results(tensors, tuple(routed.chosen for routed in out.routed))


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> StepDifference:
    """The worst over all tensors; NaN is worse than any number."""
    worst = StepDifference("", 0.0)
    for name, reference in expected.items():
        largest = (found[name].double() - reference.double()).abs().max().item()
        relative = largest / reference.double().abs().max().clamp_min(1e-30).item()
        if not relative <= worst.relative:
            worst = StepDifference(name, relative)
        if worst.relative != worst.relative:
            break
    return worst


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the tensors that differ in any bit."""
    return tuple(name for name, t in expected.items() if not torch.equal(found[name], t))


def check(model: ByteModel, text: Tensor) -> Checked:
    """Run the model fused, unfused and offloaded on the same batch.

    The unfused run takes the routers' decisions from the fused one: a tie that rounding breaks the
    other way is no difference of the ops.
    """
    # attention's fast backward on CUDA gives other bits for the same input
    with sdpa_kernel(SDPBackend.MATH) if text.is_cuda else nullcontext():
        fused = forward_backward(model, text)
        with fusion(False):
            unfused = forward_backward(model, text, fused.chosen)
            plain = explain(model, text[:, :-1])
        scope = offload.to_host(min_bytes=MIN_BYTES, root=model)
        moved = forward_backward(model, text, scope=scope)
        found = explain(model, text[:, :-1])
    return Checked(
        fused_spans=fused_and_missed(found.plans)[0],
        fusion=difference(fused.tensors, unfused.tensors),
        tolerance=TOLERANCE[text.device.type],
        offloaded_bytes=scope.report().moved_bytes,
        offload_unequal=unequal(moved.tensors, fused.tensors),
        saved_unfused=plain.saved_bytes,
        saved_fused=found.saved_bytes,
    )
