"""Cross entropy over a vocabulary that is sharded over ranks: what `linear_cross_entropy` does with a DTensor weight.

Each rank makes the logits of its classes, a chunk at a time, and of them three numbers a token (lse, the logit of the
target where it is among them, the mean logit; a fourth, their weighted sum, for label smoothing), which an all-gather
brings together: lse of all is that of the ranks' lse. The gradient of x, of which each rank has a part, is added up
over the ranks; that of the weight is local.

Gradients that the forward makes (6 N D V operations in all) are made a chunk behind: its numbers, and the gradient of x
of the one before it, travel while the next chunk's logits are multiplied, so two chunks share the budget of one. Of
gradients that the backward makes (8 N D V), one all-gather brings the numbers of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.cross_entropy import add_weight_grad, logits_of
from fuseops.kernels.reference.cross_entropy import row_chunks

from .collectives import AllGather
from .local import Ranks, SumOfGradients
from .loss_options import ROWS, LossOptions

NEVER = -1  # no target: every row has its numbers, those of a token whose class another rank has count for nothing


class Vocabulary(NamedTuple):
    """The classes of a sharded vocabulary, `total` in all, of which this rank has `held` from `first` on."""

    mesh: Any
    first: int
    held: int
    total: int

    @property
    def most(self) -> int:
        """The classes of a rank that has most of them: all ranks have the same chunks of tokens."""
        return -(-self.total // self.mesh.size())

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are among this rank's classes, and which one of them each is, 0 for the others."""
        mine = (targets >= self.first) & (targets < self.first + self.held)
        return mine, torch.where(mine, targets - self.first, 0)


class TokenLoss(NamedTuple):
    """The loss over a sharded vocabulary, as each of its tokens needs it: the same on every rank."""

    vocabulary: Vocabulary
    options: LossOptions
    class_weights: Tensor | None  # (V,)

    @property
    def own_weights(self) -> Tensor | None:
        """The weights of this rank's classes, where a label is smoothed over them."""
        first, held = self.vocabulary.first, self.vocabulary.held
        smoothed = self.class_weights is not None and self.options.label_smoothing
        return self.class_weights[first : first + held] if smoothed else None  # type: ignore[index]

    @property
    def own_ends(self) -> dict[str, Any]:
        """What a rank's classes are asked for: of a label that is smoothed entirely the loss is the sum of logits."""
        return {"ignore_index": NEVER, "label_smoothing": float(self.options.label_smoothing > 0)}

    def numbers(
        self, rest: Tensor, lse: Tensor, logp: Tensor, expected: Tensor, mine: Tensor
    ) -> Tensor:
        """What this rank's classes say of every token: (3 or 4, ...).   rest: the loss with `own_ends`"""
        found = [lse, torch.where(mine, logp + lse, 0), expected]
        if self.options.label_smoothing:  # rest = 1 / held sum_c w_c (lse - l_c)
            held, weights = self.vocabulary.held, self.own_weights
            found.append((held if weights is None else weights.sum()) * lse - held * rest)
        return torch.stack(found)

    def of_all(self, gathered: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and what can be published of it, from all ranks' numbers (ranks, 3 or 4, ...)."""
        parts, logits, expected, *sums = gathered.unbind(1)
        options, weights = self.options, self.class_weights
        lse = parts.logsumexp(0)
        counts = targets != options.ignore_index
        known = (targets >= 0) & (targets < self.vocabulary.total)
        log_probs = torch.where(counts, logits.sum(0) - lse, 0)
        log_probs = log_probs.masked_fill(counts & ~known, torch.nan)
        entropy = lse - ((parts - lse).exp() * expected).sum(0)
        loss = torch.where(counts, options.z_loss * lse.square(), 0)
        loss = loss - (1 - options.label_smoothing) * self.scale(targets, lse.dtype) * log_probs
        if options.label_smoothing:
            total = self.vocabulary.total if weights is None else weights.sum()
            smooth = torch.where(counts, total * lse - sums[0].sum(0), 0)
            loss = loss + options.label_smoothing / self.vocabulary.total * smooth
        return loss, {"lse": lse, "log_probs": log_probs, "entropy": entropy}

    def scale(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each token's target, 0 for one that does not count."""
        scale = (targets != self.options.ignore_index).to(dtype)
        if self.class_weights is None:
            return scale
        return scale * self.class_weights.to(dtype)[targets.clamp(0, self.vocabulary.total - 1)]

    def divisor(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """What the sum of the tokens' losses is divided by.   ()"""
        if self.options.reduction == "mean":
            return self.scale(targets, dtype).sum()
        return torch.ones((), dtype=dtype, device=targets.device)


def sharded_cross_entropy(
    local: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    targets: Tensor,
    class_weights: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and what `options.publishes` names. The same on every rank.

    local: `linear_cross_entropy`, for this rank's classes.  weight: a DTensor (V, D), `Shard(0)` over a mesh of one
    dimension, and so bias (V,).  x, targets and class_weights: plain, the same on every rank.
    Raises FuseOpsError for other placements.
    """
    loss = TokenLoss(_vocabulary(weight), options, class_weights)
    w, b = weight.to_local(), None if bias is None else _local_bias(bias)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, b))
    # traced code would write its loop out, anew for every number of tokens
    if wanted and options.way == "forward" and not torch.compiler.is_compiling():
        return _MadeWithLoss.apply(x, w, b, targets, loss), {}  # type: ignore[no-untyped-call]
    return _made_again(local, x, w, b, targets, loss)


def _made_again(
    local: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss: TokenLoss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, whose gradients the backward makes from logits that it makes again, and what is published."""
    mesh, options = loss.vocabulary.mesh, loss.options
    mine, at = loss.vocabulary.own(targets)
    rest, lse, logp, entropy = local(
        SumOfGradients.apply(x, Ranks(mesh)),  # type: ignore[no-untyped-call]
        weight,
        at,
        linear_bias=bias,
        weight=loss.own_weights,
        reduction="none",
        soft_cap=options.soft_cap,
        temperature=options.temperature,
        publishes=ROWS,
        chunk_bytes=options.chunk_bytes,
        **loss.own_ends,
    )
    numbers = loss.numbers(rest, lse, logp, lse - entropy, mine)
    gathered = AllGather(mesh, dim=0, grad="replicate").fwd(numbers[None]).y
    rows, published = loss.of_all(gathered, targets)
    if options.reduction != "none":
        rows = (rows / loss.divisor(targets, rows.dtype)).sum()
    return rows, {name: published[name] for name in options.publishes}


# --- gradients that are made with the loss


class _MadeWithLoss(torch.autograd.Function):
    """The loss over a sharded vocabulary, whose gradients the forward makes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: TokenLoss
    ) -> Tensor:
        at = targets.reshape(-1)
        total = loss.divisor(at, K.accumulator(x.dtype))
        unit = unit_of(total)
        made = _Gradients(loss, x, weight, bias, at, unit / total, ctx.needs_input_grad[:3])
        ctx.save_for_backward(made.of_x(), made.dweight, made.dbias, unit)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        return (made.rows / total).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        *made, unit = ctx.saved_tensors
        pairs = zip(made, ctx.dtypes, strict=True)
        scaled = (None if t is None else K.scaled_to(t, dy / unit, dtype) for t, dtype in pairs)
        return *scaled, None, None


class _Sent(NamedTuple):
    """A chunk of tokens, with the logits of this rank's classes, whose numbers are on their way between the ranks."""

    tokens: slice
    logits: Tensor
    numbers: Tensor


class _Gradients:
    """The tokens' losses `rows`, and the gradients of x, weight and bias, None where nobody needs one.

    x (..., D), weight (held, D), bias (held,), targets (N,).   dloss: (), the gradient of each token's loss
    """

    def __init__(
        self,
        loss: TokenLoss,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dloss: Tensor,
        needs: Sequence[bool],
    ) -> None:
        self.loss, self.weight, self.bias, self.needs = loss, weight, bias, needs
        self.x, self.shape, self.targets = x.reshape(-1, x.shape[-1]), x.shape, targets
        sums = K.accumulator(x.dtype)
        self.rows = torch.empty(len(targets), dtype=sums, device=x.device)
        self.dloss = dloss.expand_as(self.rows)
        self.dx: list[Tensor] = []
        self.dweight = torch.empty_like(weight, dtype=sums) if needs[1] else None
        self.dbias = weight.new_zeros(len(weight), dtype=sums) if needs[2] else None
        sent, budget = None, loss.options.chunk_bytes // 2
        for tokens in row_chunks(len(targets), loss.vocabulary.most, x.itemsize, budget):
            before, sent = sent, self.send(tokens)
            if before is not None:
                self.take(before)
        self.take(sent)  # type: ignore[arg-type]

    def send(self, tokens: slice) -> _Sent:
        """The logits of a chunk, and their numbers on the way."""
        loss, options = self.loss, self.loss.options
        mine, at = loss.vocabulary.own(self.targets[tokens])
        ends = loss.own_ends
        numbers = [ends["label_smoothing"], 0.0, options.soft_cap or 0.0, options.temperature]
        logits = logits_of(self.x[tokens], self.weight, self.bias)
        rows = K.logit_rows(logits, at, loss.own_weights, numbers, ends["ignore_index"])
        told = loss.numbers(*rows, mine)
        return _Sent(
            tokens, logits, torch_private.begin_all_gather(told[None], 0, loss.vocabulary.mesh)
        )

    def take(self, sent: _Sent) -> None:
        """The loss of a chunk, and what it adds to the gradients; that of its x is on the way."""
        loss, (tokens, logits, numbers) = self.loss, sent
        options, vocabulary, targets = loss.options, loss.vocabulary, self.targets[tokens]
        self.rows[tokens], published = loss.of_all(torch_private.waited(numbers), targets)
        ends = [
            options.label_smoothing,
            options.z_loss,
            options.soft_cap or 0.0,
            options.temperature,
        ]
        K.logit_grads_into(
            *(logits, targets, loss.class_weights, published["lse"], self.dloss[tokens], ends),
            *(options.ignore_index, vocabulary.first, vocabulary.total),
        )
        if self.needs[0]:
            dx = torch.mm(logits, self.weight)
            self.dx.append(torch_private.begin_all_reduce(dx, vocabulary.mesh))
        if self.dweight is not None:
            add_weight_grad(self.dweight, logits, self.x[tokens], first=tokens.start == 0)
        if self.dbias is not None:
            self.dbias += K.bias_bwd(logits)

    def of_x(self) -> Tensor | None:
        """The gradient of x, once all of it is there."""
        if not self.needs[0]:
            return None
        return torch.cat([torch_private.waited(dx) for dx in self.dx]).view(self.shape)


# --- the layout


def _vocabulary(weight: Any) -> Vocabulary:
    """The classes of a sharded weight. Raises FuseOpsError for one that is laid out in another way."""
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
    first = mesh.get_local_rank() * each
    return Vocabulary(mesh, first, len(weight.to_local()), weight.shape[0])


def _local_bias(bias: Any) -> Tensor:
    if not torch_private.is_dtensor(type(bias)) or not bias.placements[0].is_shard(0):
        raise FuseOpsError(
            "LinearCrossEntropy with a weight sharded over ranks takes a bias that is Shard(0) too."
        )
    part: Tensor = bias.to_local()
    return part


def unit_of(total: Tensor) -> Tensor:
    """What a forward multiplies the gradients by that it makes, and the backward divides by: a power of two near
    `total`, the count of tokens.

    float16 cannot hold them divided by a count of tokens, and what a GradScaler multiplies by comes later.
    """
    return torch.ldexp(torch.ones_like(total), torch.frexp(total).exponent - 1)
