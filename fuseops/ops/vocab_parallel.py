"""Cross entropy over a vocabulary that is sharded over ranks: what `LinearCrossEntropy` does with its part of a weight.

Each rank makes the logits of its classes, a chunk at a time, and of them three numbers a token (lse, the logit of the
target where it is among them, the mean logit; a fourth, their weighted sum, for label smoothing), which an all-gather
brings together: lse of all is that of the ranks' lse. The gradient of x, of which each rank has a part, is added up
over the ranks; that of the weight is local.

Gradients that the forward makes (6 N D V operations in all) are made a chunk behind: its numbers, and the gradient of x
of the one before it, travel while the next chunk's logits are multiplied, so two chunks share the budget of one. Of
gradients that the backward makes (8 N D V), one all-gather brings the numbers of all tokens.

Shapes: x (N, D), weight (held, D), bias (held,), targets (N,) int64, class_weights (V,); numbers (3 or 4, N).
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
from .local import Ranks, sum_of_gradients
from .loss_options import LossOptions

NEVER = -1  # no target: every row has its numbers, those of a token whose class another rank has count for nothing


class Vocabulary(NamedTuple):
    """A `Vocabulary` says which classes of a sharded vocabulary this rank has: `held` of `total`, from `first` on."""

    ranks: Ranks
    first: int
    held: int
    total: int

    @property
    def most(self) -> int:
        """The classes of a rank that has most of them: all ranks have the same chunks of tokens."""
        return -(-self.total // self.ranks.size)

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are among this rank's classes, and which one of them each is, 0 for the others."""
        mine = (targets >= self.first) & (targets < self.first + self.held)
        return mine, torch.where(mine, targets - self.first, 0)


class PartialSoftmax(NamedTuple):
    """A `PartialSoftmax` holds what this rank's classes give to each token's softmax, and what all ranks gave.

    lse, expected: (N,), of the softmax over this rank's classes alone.  gathered: (ranks, 3 or 4, N)
    """

    lse: Tensor
    expected: Tensor
    gathered: Tensor


class TokenGrads(NamedTuple):
    """`TokenGrads` are the gradients of each token's loss and of the numbers published with it: (N,) each."""

    loss: Tensor
    lse: Tensor
    log_probs: Tensor
    entropy: Tensor


class ShardedLoss(NamedTuple):
    """A `ShardedLoss` computes the loss of tokens over a sharded vocabulary: the same on every rank."""

    vocabulary: Vocabulary
    options: LossOptions
    class_weights: Tensor | None

    # --- numbers of tokens

    @property
    def own_weights(self) -> Tensor | None:
        """The weights of this rank's classes, where a label is smoothed over them."""
        first, held = self.vocabulary.first, self.vocabulary.held
        smoothed = self.class_weights is not None and self.options.label_smoothing
        return self.class_weights[first : first + held] if smoothed else None  # type: ignore[index]

    @property
    def own_ends(self) -> list[float]:
        """What kernels are told of this rank's classes: of a label that is smoothed entirely, if at all, the loss is
        the sum of logits.
        """
        return [float(self.options.label_smoothing > 0), 0.0, *self.options.ends[2:]]

    def numbers(self, rows: Sequence[Tensor], mine: Tensor) -> Tensor:
        """What the other ranks need.   rows: (loss, lse, logp, expected) with `own_ends`"""
        rest, lse, logp, expected = rows
        found = [lse, torch.where(mine, logp + lse, 0), expected]
        if self.options.label_smoothing:  # rest = 1 / held sum_c w_c (lse - l_c)
            found.append(self._own_total() * lse - self.vocabulary.held * rest)
        return torch.stack(found)

    def _own_total(self) -> Any:
        weights = self.own_weights
        return self.vocabulary.held if weights is None else weights.sum()

    def of_all(self, gathered: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and what can be published of it."""
        parts, logits, expected, *sums = gathered.unbind(1)
        options = self.options
        lse = parts.logsumexp(0)
        counts, known = self._which(targets)
        log_probs = torch.where(counts, logits.sum(0) - lse, 0)
        log_probs = log_probs.masked_fill(counts & ~known, torch.nan)
        entropy = lse - ((parts - lse).exp() * expected).sum(0)
        loss = torch.where(counts, options.z_loss * lse * lse, 0)
        loss = loss - self._hard(targets, lse.dtype) * log_probs
        if options.label_smoothing:
            smooth = torch.where(counts, self._total() * lse - sums[0].sum(0), 0)
            loss = loss + options.label_smoothing / self.vocabulary.total * smooth
        return loss, {"lse": lse, "log_probs": log_probs, "entropy": entropy}

    def own_grads(self, d: TokenGrads, gathered: Tensor, targets: Tensor) -> list[Tensor]:
        """The gradients of this rank's (loss, lse, logp, expected) with `own_ends`, through `numbers` and `of_all`."""
        options = self.options
        parts, _, expected, *_ = gathered.unbind(1)
        lse = parts.logsumexp(0)
        p = (parts - lse).exp()
        own_p, own_expected = p[self.vocabulary.ranks.rank], expected[self.vocabulary.ranks.rank]
        counts, known = self._which(targets)
        dlogp = d.log_probs - self._hard(targets, lse.dtype) * d.loss
        dlogp = torch.where(counts, dlogp, 0).masked_fill(counts & ~known, torch.nan)
        smooth = torch.where(counts, options.label_smoothing / self.vocabulary.total * d.loss, 0)
        dlse = d.lse + d.entropy * (1 + (p * expected).sum(0)) - dlogp
        dlse = dlse + torch.where(counts, 2 * options.z_loss * lse * d.loss, 0)
        if options.label_smoothing:
            dlse = dlse + self._total() * smooth
        mine, _ = self.vocabulary.own(targets)
        own_logp = torch.where(mine, dlogp, 0)
        own_lse = own_p * (dlse - d.entropy * own_expected) + own_logp
        if options.label_smoothing:
            own_lse = own_lse - self._own_total() * smooth
        return [self.vocabulary.held * smooth, own_lse, own_logp, -d.entropy * own_p]

    def _which(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets count, and which are classes."""
        known = (targets >= 0) & (targets < self.vocabulary.total)
        return targets != self.options.ignore_index, known

    def _hard(self, targets: Tensor, dtype: torch.dtype) -> Any:
        """What the log-probability of each token's target is multiplied by, 0 for one that does not count."""
        scale = (targets != self.options.ignore_index).to(dtype) * (
            1 - self.options.label_smoothing
        )
        if self.class_weights is None:
            return scale
        return scale * self.class_weights.to(dtype)[targets.clamp(0, self.vocabulary.total - 1)]

    def _total(self) -> Any:
        return self.vocabulary.total if self.class_weights is None else self.class_weights.sum()

    # --- forward, and a backward that makes the logits again

    def fwd(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], PartialSoftmax]:
        """The loss of each token, what can be published of it, and what `bwd` reads."""
        ranks = self.vocabulary.ranks
        # autograd differentiates it, as plain torch
        if torch.is_grad_enabled() and x.requires_grad:
            x = sum_of_gradients(x, ranks)
        mine, at = self.vocabulary.own(targets)
        ends = self.own_ends, NEVER, self.options.chunk_bytes
        own: Any = x, weight, bias, at, self.own_weights, *ends
        rows = K.linear_cross_entropy_fwd(*own)
        numbers = self.numbers(rows, mine)[None]
        if torch.is_grad_enabled() and numbers.requires_grad:
            gathered = AllGather(ranks.group, dim=0, grad="replicate").fwd(numbers).y
        else:
            gathered = torch_private.all_gather(numbers, 0, ranks.group)
        loss, published = self.of_all(gathered, targets)
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
        grads = self.own_grads(d, numbers.gathered, targets)
        _, at = self.vocabulary.own(targets)
        ends = self.own_ends, NEVER, self.options.chunk_bytes
        own: Any = x, weight, bias, at, self.own_weights, *ends, *numbers[:2], grads, needs
        dx, dweight, dbias = K.linear_cross_entropy_bwd(*own)
        if needs[0]:
            dx = torch_private.all_reduce(dx, self.vocabulary.ranks.group)
        return dx, dweight, dbias


class _Sent(NamedTuple):
    """A `_Sent` is a chunk of tokens, with this rank's logits, whose numbers are on their way between the ranks."""

    tokens: slice
    logits: Tensor
    numbers: Any


class Walk:
    """A `Walk` goes over chunks of tokens and makes their losses and the gradients that are needed, where the gradient
    of each token's loss, `dloss`, is known beforehand.
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
        self.dx: list[Any] = []  # chunk after chunk, on its way
        self.dweight = torch.empty_like(weight, dtype=dloss.dtype) if needs[1] else None
        self.dbias = weight.new_zeros(len(weight), dtype=dloss.dtype) if needs[2] else None

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(loss of each token, dx, dweight, dbias)."""
        sent, most, budget = None, self.loss.vocabulary.most, self.loss.options.chunk_bytes // 2
        for tokens in row_chunks(len(self.targets), most, self.x.itemsize, budget):
            before, sent = sent, self.send(tokens)
            if before is not None:
                self.take(before)
        self.take(sent)  # type: ignore[arg-type]
        dx = torch.cat([*map(torch_private.wait_tensor, self.dx)]) if self.wants_dx else None
        return self.rows, dx, self.dweight, self.dbias

    def send(self, tokens: slice) -> _Sent:
        """The logits of a chunk, and their numbers on the way."""
        loss, group = self.loss, self.loss.vocabulary.ranks.group
        mine, at = loss.vocabulary.own(self.targets[tokens])
        ends = loss.own_weights, loss.own_ends, NEVER
        own: Any = self.x[tokens], self.weight, self.bias, at, *ends
        logits, *rows = K.logits_with_rows(*own)
        numbers = loss.numbers(rows, mine)[None]
        return _Sent(tokens, logits, torch_private.all_gather_async(numbers, 0, group))

    def take(self, sent: _Sent) -> None:
        """The loss of a chunk, and what it adds to the gradients; that of its x is on the way."""
        loss, (tokens, logits, numbers) = self.loss, sent
        options, vocabulary, targets = loss.options, loss.vocabulary, self.targets[tokens]
        self.rows[tokens], published = loss.of_all(torch_private.wait_tensor(numbers), targets)
        of_all = targets, loss.class_weights, published["lse"], self.dloss[tokens]
        ends = options.ends, options.ignore_index, vocabulary.first, vocabulary.total
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
    """`total` classes in contiguous parts over the ranks of a mesh: one `Vocabulary`, by which ops are told apart.

    Raises FuseOpsError where a rank would have none.
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
