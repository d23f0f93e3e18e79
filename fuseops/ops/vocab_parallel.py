"""Cross entropy over a vocabulary that is sharded over ranks: what `linear_cross_entropy` does with a DTensor weight.

Each rank makes the logits of its classes, a chunk at a time, and of them three numbers a token (lse, the logit of the
target where it is among them, the mean logit; a fourth, their weighted sum, for label smoothing), which one all-gather
brings together: lse of all is that of the ranks' lse. The gradient of x, of which each rank has a part, is added up
over the ranks; that of the weight is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError

from .collectives import AllGather
from .local import Ranks, SumOfGradients
from .loss_options import ROWS, LossOptions

NEVER = -1  # no target: every row has its numbers, those of a token whose class another rank has count for nothing


def sharded_cross_entropy(
    local: Callable[..., Any],
    x: Tensor,
    weight: Any,
    bias: Any,
    targets: Tensor,
    class_weights: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what `options.publishes` names. The same on every rank.

    local: `linear_cross_entropy`, for this rank's classes.  weight: a DTensor (V, D), `Shard(0)` over a mesh of one
    dimension, and so bias (V,).  x, targets and class_weights: plain, the same on every rank.
    Raises FuseOpsError for other placements and gradients in the forward.
    """
    if options.gradients == "forward":
        raise FuseOpsError(
            'LinearCrossEntropy with a weight sharded over ranks has no gradients="forward".'
        )
    mesh, first, count = _classes(weight)
    ranks = Ranks(mesh)
    mine = (targets >= first) & (targets < first + count)
    smoothing = options.label_smoothing
    classes = None if class_weights is None else class_weights[first : first + count]
    # smoothed entirely, a row's loss is 1 / count sum_c w_c (lse - l_c)
    rest, lse, logp, entropy = local(
        SumOfGradients.apply(x, ranks),  # type: ignore[no-untyped-call]
        weight.to_local(),
        torch.where(mine, targets - first, 0),
        linear_bias=None if bias is None else _local_bias(bias),
        weight=classes if smoothing else None,
        ignore_index=NEVER,
        label_smoothing=float(smoothing > 0),
        reduction="none",
        soft_cap=options.soft_cap,
        temperature=options.temperature,
        publishes=ROWS,
        chunk_bytes=options.chunk_bytes,
    )
    rows = [lse, torch.where(mine, logp + lse, 0), lse - entropy]
    if smoothing:
        total = count if classes is None else classes.sum()
        rows.append(total * lse - count * rest)
    gathered = AllGather(mesh, dim=0, grad="replicate").fwd(torch.stack(rows)[None]).y
    parts, logits, expected, *sums = gathered.unbind(1)  # (ranks, ...) each
    lse = parts.logsumexp(0)
    counts = targets != options.ignore_index
    known = (targets >= 0) & (targets < weight.shape[0])
    log_probs = torch.where(counts, logits.sum(0) - lse, 0)
    log_probs = log_probs.masked_fill(counts & ~known, torch.nan)
    entropy = lse - ((parts - lse).exp() * expected).sum(0)
    published = {"lse": lse, "log_probs": log_probs, "entropy": entropy}
    loss = torch.where(counts, options.z_loss * lse.square(), 0)
    scale = counts.to(lse.dtype)
    if class_weights is not None:
        at = targets.clamp(0, len(class_weights) - 1)
        scale = scale * class_weights.to(lse.dtype)[at]
    loss = loss - (1 - smoothing) * scale * log_probs
    if smoothing:
        total = weight.shape[0] if class_weights is None else class_weights.sum()
        smooth = total * lse - sums[0].sum(0)
        loss = loss + smoothing / weight.shape[0] * torch.where(counts, smooth, 0)
    if options.reduction != "none":
        loss = loss.sum() / (scale.sum() if options.reduction == "mean" else 1)
    return loss, {name: published[name] for name in options.publishes}


def _classes(weight: Any) -> tuple[Any, int, int]:
    """The mesh of a sharded weight, and of this rank's classes the first and how many.

    Raises FuseOpsError for a weight that is laid out in another way.
    """
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise FuseOpsError(
            f"LinearCrossEntropy takes a weight (V, D) that is Shard(0) over a mesh of one dimension, got {placements} "
            f"over {mesh}: distribute_tensor(weight, mesh['tp'], [Shard(0)])."
        )
    each = -(-weight.shape[0] // mesh.size())
    if each * (mesh.size() - 1) >= weight.shape[0]:
        raise FuseOpsError(
            f"LinearCrossEntropy: a weight of {weight.shape[0]} classes leaves some of {mesh.size()} ranks without "
            "one. Shard it over fewer."
        )
    return mesh, mesh.get_local_rank() * each, len(weight.to_local())


def _local_bias(bias: Any) -> Tensor:
    if not torch_private.is_dtensor(type(bias)) or not bias.placements[0].is_shard(0):
        raise FuseOpsError(
            "LinearCrossEntropy with a weight sharded over ranks takes a bias that is Shard(0) too."
        )
    part: Tensor = bias.to_local()
    return part
