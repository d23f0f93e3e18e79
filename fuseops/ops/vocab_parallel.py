"""`ShardedLoss` is the cross entropy of `LinearCrossEntropy` over a vocabulary that is sharded over ranks.

Each rank computes the logits of its classes, a chunk at a time, and three numbers a token of them: lse, the logit of
the target where it is a local class, and the mean logit (for label smoothing also their weighted sum). An all-gather
collects the numbers; the lse of the vocabulary is the logsumexp of the ranks' lse. The gradient of x is summed over the
ranks; that of the weight is local.

With gradients="forward" (6 N D V operations in all) the numbers of a chunk, and the gradient of x of the chunk before,
are sent while the next chunk's logits are computed, so two chunks share the budget of one. With gradients="backward"
(8 N D V) one all-gather collects the numbers of all tokens.

Shapes: x (N, D), weight (local_size, D), bias (local_size,), targets (N,) int64, class_weights (V,); numbers (3 or 4,
N).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.cross_entropy import row_chunks

from .collectives import AllGather
from .local import Ranks, sum_gradients
from .loss_options import LossOptions

# an ignore_index that no local target has: numbers of targets on other ranks are masked later
NO_IGNORED = -1


class Vocabulary(NamedTuple):
    """A `Vocabulary` is sharded over ranks: this rank has `local_size` of `total` classes, from `first` on."""

    ranks: Ranks
    first: int
    local_size: int
    total: int

    @property
    def max_local_size(self) -> int:
        """The largest shard, from which all ranks derive the same chunks of tokens."""
        return -(-self.total // self.ranks.size)

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(a mask of targets among the local classes, their local index, 0 for the others)."""
        mine = (targets >= self.first) & (targets < self.first + self.local_size)
        return mine, torch.where(mine, targets - self.first, 0)


class PartialSoftmax(NamedTuple):
    """A `PartialSoftmax` holds statistics of each token's softmax over the local classes, and those of all ranks.

    lse, expected: (N,), over the local classes.  gathered: the numbers of all ranks, (ranks, 3 or 4, N)
    """

    lse: Tensor
    expected: Tensor
    gathered: Tensor


class TokenGrads(NamedTuple):
    """`TokenGrads` are the gradients of each token's loss and published numbers: (N,) each."""

    loss: Tensor
    lse: Tensor
    log_probs: Tensor
    entropy: Tensor


class ShardedLoss(NamedTuple):
    """A `ShardedLoss` computes the loss of each token over a sharded vocabulary; it is equal on all ranks."""

    vocabulary: Vocabulary
    options: LossOptions
    class_weights: Tensor | None

    # --- numbers of tokens

    @property
    def local_weights(self) -> Tensor | None:
        """The weights of the local classes, under label smoothing."""
        first, local_size = self.vocabulary.first, self.vocabulary.local_size
        smoothed = self.class_weights is not None and self.options.label_smoothing
        return self.class_weights[first : first + local_size] if smoothed else None  # type: ignore[index]

    @property
    def local_kernel_options(self) -> list[float]:
        """The kernel options for the local classes: with label_smoothing 1 the loss is the sum over classes."""
        return [float(self.options.label_smoothing > 0), 0.0, *self.options.kernel_options[2:]]

    def numbers(self, rows: Sequence[Tensor], mine: Tensor) -> Tensor:
        """The numbers to gather.   rows: local (loss, lse, logp, expected); mine: the mask of local targets"""
        rest, lse, logp, expected = rows
        found = [lse, torch.where(mine, logp + lse, 0), expected]
        if self.options.label_smoothing:  # rest = 1 / local_size sum_c w_c (lse - l_c)
            found.append(self._local_weight_sum() * lse - self.vocabulary.local_size * rest)
        return torch.stack(found)

    def _local_weight_sum(self) -> Any:
        weights = self.local_weights
        return self.vocabulary.local_size if weights is None else weights.sum()

    def token_losses(self, gathered: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and its publishable numbers by name."""
        parts, logits, expected, *sums = gathered.unbind(1)
        options = self.options
        lse = parts.logsumexp(0)
        counts, known = self._target_masks(targets)
        log_probs = torch.where(counts, logits.sum(0) - lse, 0)
        log_probs = log_probs.masked_fill(counts & ~known, torch.nan)
        entropy = lse - ((parts - lse).exp() * expected).sum(0)
        loss = torch.where(counts, options.z_loss * lse * lse, 0)
        loss = loss - self._target_coefficient(targets, lse.dtype) * log_probs
        if options.label_smoothing:
            smooth = torch.where(counts, self._weight_sum() * lse - sums[0].sum(0), 0)
            loss = loss + options.label_smoothing / self.vocabulary.total * smooth
        return loss, {"lse": lse, "log_probs": log_probs, "entropy": entropy}

    def local_grads(self, d: TokenGrads, gathered: Tensor, targets: Tensor) -> list[Tensor]:
        """The gradients of the local (loss, lse, logp, expected), through `numbers` and `token_losses`."""
        options = self.options
        parts, _, expected, *_ = gathered.unbind(1)
        lse = parts.logsumexp(0)
        p = (parts - lse).exp()
        own_p, own_expected = p[self.vocabulary.ranks.rank], expected[self.vocabulary.ranks.rank]
        counts, known = self._target_masks(targets)
        dlogp = d.log_probs - self._target_coefficient(targets, lse.dtype) * d.loss
        dlogp = torch.where(counts, dlogp, 0).masked_fill(counts & ~known, torch.nan)
        smooth = torch.where(counts, options.label_smoothing / self.vocabulary.total * d.loss, 0)
        dlse = d.lse + d.entropy * (1 + (p * expected).sum(0)) - dlogp
        dlse = dlse + torch.where(counts, 2 * options.z_loss * lse * d.loss, 0)
        if options.label_smoothing:
            dlse = dlse + self._weight_sum() * smooth
        mine, _ = self.vocabulary.local_targets(targets)
        own_logp = torch.where(mine, dlogp, 0)
        own_lse = own_p * (dlse - d.entropy * own_expected) + own_logp
        if options.label_smoothing:
            own_lse = own_lse - self._local_weight_sum() * smooth
        return [self.vocabulary.local_size * smooth, own_lse, own_logp, -d.entropy * own_p]

    def _target_masks(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(a mask of targets that are not ignored, a mask of targets that are classes)."""
        known = (targets >= 0) & (targets < self.vocabulary.total)
        return targets != self.options.ignore_index, known

    def _target_coefficient(self, targets: Tensor, dtype: torch.dtype) -> Any:
        """The factor of each target's log-probability in the loss, 0 for an ignored one."""
        scale = (targets != self.options.ignore_index).to(dtype) * (
            1 - self.options.label_smoothing
        )
        if self.class_weights is None:
            return scale
        return scale * self.class_weights.to(dtype)[targets.clamp(0, self.vocabulary.total - 1)]

    def _weight_sum(self) -> Any:
        return self.vocabulary.total if self.class_weights is None else self.class_weights.sum()

    # --- forward, and a backward that recomputes the logits

    def fwd(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], PartialSoftmax]:
        """(the loss of each token, its publishable numbers by name, statistics for `bwd`)."""
        ranks = self.vocabulary.ranks
        # plain torch, differentiated by autograd
        if torch.is_grad_enabled() and x.requires_grad:
            x = sum_gradients(x, ranks)
        mine, at = self.vocabulary.local_targets(targets)
        ends = self.local_kernel_options, NO_IGNORED, self.options.chunk_bytes
        own: Any = x, weight, bias, at, self.local_weights, *ends
        rows = K.linear_cross_entropy_fwd(*own)
        numbers = self.numbers(rows, mine)[None]
        if torch.is_grad_enabled() and numbers.requires_grad:
            gathered = AllGather(ranks.group, dim=0, grad="replicate").fwd(numbers).y
        else:
            gathered = torch_private.all_gather(numbers, 0, ranks.group)
        loss, published = self.token_losses(gathered, targets)
        return loss, published, PartialSoftmax(rows[1], rows[3], gathered)

    def bwd(
        self,
        d: TokenGrads,
        numbers: PartialSoftmax,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        needs: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, dweight, dbias), each if it is among `needs`."""
        grads = self.local_grads(d, numbers.gathered, targets)
        _, at = self.vocabulary.local_targets(targets)
        ends = self.local_kernel_options, NO_IGNORED, self.options.chunk_bytes
        own: Any = x, weight, bias, at, self.local_weights, *ends, *numbers[:2], grads, needs
        dx, dweight, dbias = K.linear_cross_entropy_bwd(*own)
        if needs[0]:
            dx = torch_private.all_reduce(dx, self.vocabulary.ranks.group)
        return dx, dweight, dbias


class _PendingChunk(NamedTuple):
    """A `_PendingChunk` is a chunk of tokens with its local logits, whose numbers are being gathered."""

    tokens: slice
    logits: Tensor
    numbers: Any


class ChunkedStep:
    """A `ChunkedStep` computes losses and gradients chunk by chunk, where the gradient of the loss, `dloss`, is
    known.
    """

    def __init__(
        self,
        loss: ShardedLoss,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dloss: Tensor,
        needs: Sequence[bool],
    ) -> None:
        self.loss, self.x, self.weight, self.bias, self.targets = loss, x, weight, bias, targets
        self.dloss, self.wants_dx = dloss, needs[0]
        self.rows = torch.empty(len(targets), dtype=dloss.dtype, device=x.device)
        self.dx: list[Any] = []  # pending all-reduces, one a chunk
        self.dweight = torch.empty_like(weight, dtype=dloss.dtype) if needs[1] else None
        self.dbias = weight.new_zeros(len(weight), dtype=dloss.dtype) if needs[2] else None

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(loss of each token, dx, dweight, dbias)."""
        size, budget = self.loss.vocabulary.max_local_size, self.loss.options.chunk_bytes // 2
        pending = None
        for tokens in row_chunks(len(self.targets), size, self.x.itemsize, budget):
            previous, pending = pending, self.start(tokens)
            if previous is not None:
                self.finish(previous)
        self.finish(pending)  # type: ignore[arg-type]
        dx = torch.cat([*map(torch_private.wait_tensor, self.dx)]) if self.wants_dx else None
        return self.rows, dx, self.dweight, self.dbias

    def start(self, tokens: slice) -> _PendingChunk:
        """Compute the local logits of a chunk, and begin to gather its numbers."""
        loss, group = self.loss, self.loss.vocabulary.ranks.group
        mine, at = loss.vocabulary.local_targets(self.targets[tokens])
        ends = loss.local_weights, loss.local_kernel_options, NO_IGNORED
        own: Any = self.x[tokens], self.weight, self.bias, at, *ends
        logits, *rows = K.logits_with_rows(*own)
        numbers = loss.numbers(rows, mine)[None]
        return _PendingChunk(tokens, logits, torch_private.all_gather_async(numbers, 0, group))

    def finish(self, chunk: _PendingChunk) -> None:
        """Compute the loss of a chunk, accumulate its gradients, and begin to reduce that of its x."""
        loss, (tokens, logits, numbers) = self.loss, chunk
        options, vocabulary, targets = loss.options, loss.vocabulary, self.targets[tokens]
        self.rows[tokens], published = loss.token_losses(
            torch_private.wait_tensor(numbers), targets
        )
        of_all = targets, loss.class_weights, published["lse"], self.dloss[tokens]
        ends = options.kernel_options, options.ignore_index, vocabulary.first, vocabulary.total
        sums = self.wants_dx, self.dweight, self.dbias, tokens.start == 0
        args: Any = logits, self.x[tokens], self.weight, *of_all, *ends, *sums
        dx = K.logit_grads_into(*args)
        if self.wants_dx:
            self.dx.append(torch_private.all_reduce_async(dx, vocabulary.ranks.group))


# --- the layout


def check_layout(weight: Any, bias: Any = None) -> None:
    """Raise FuseOpsError unless a DTensor (V, D) is `Shard(0)` over a mesh of one dimension, and so is a bias (V,)."""
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise FuseOpsError(
            f"LinearCrossEntropy takes a weight (V, D) that is Shard(0) over a mesh of one dimension, got {placements} "
            f"over {mesh}: distribute_tensor(weight, mesh['tp'], [Shard(0)])."
        )
    if bias is not None and not (
        torch_private.is_dtensor(type(bias)) and bias.placements[0].is_shard(0)
    ):
        raise FuseOpsError(
            "LinearCrossEntropy with a weight sharded over ranks takes a bias that is Shard(0) too."
        )


@functools.cache
def vocabulary_over(mesh: Any, total: int) -> Vocabulary:
    """The `Vocabulary` of `total` classes in contiguous shards over a mesh, cached: ops compare it by identity.

    Raises FuseOpsError where a rank would have no class.
    """
    ranks = Ranks(mesh)
    each = -(-total // ranks.size)
    if each * (ranks.size - 1) >= total:
        raise FuseOpsError(
            f"LinearCrossEntropy: a weight of {total} classes leaves some of {ranks.size} ranks without one. Shard it "
            "over fewer."
        )
    first = ranks.rank * each
    return Vocabulary(ranks, first, min(each, total - first), total)
