"""Router chooses the experts of each token and their weights, and publishes the losses that keep the load even.

    logits = x W^T (+ b) in float32;  scores s = softmax(logits) or sigmoid(logits)
    experts: the top k of s, or of s + expert_bias, of all experts or of the best groups of them
    weights = scale * s[experts], divided by their sum + 1e-20 if `normalize`, as in DeepSeek-V3

Losses, with f_e the share of all T * K copies that expert e gets and p_t the scores of token t, which sum to 1 (for
sigmoid s / sum(s)), and lse the logarithm of the sum of exp:

    balance   balance_loss * E * sum over e of f_e * mean over t of p_te    Switch Transformer, arXiv 2101.03961, eq. 4
    z         z_loss * mean over t of lse(logits_t)^2                       ST-MoE, arXiv 2202.08906, eq. 5

The first is 1 where the load is even, E at worst; f_e has no gradient. Both are over the tokens of this call.
"""

import copy
import math
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.arguments import (
    check_flags,
    check_integers,
    check_numbers,
    instance_of,
    is_number,
    shown,
)
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.router import SCORES, scores_of, weights_of

from .checks import check_experts, check_rows, check_width
from .op import Call, Grads, Op, Out, Shape, changed_options

WITHOUT_LOSS = ("experts", "weights")
WITH_LOSS = (*WITHOUT_LOSS, "router_loss")
CHOICE_STAYS_HIGH = "a small error of a logit chooses another expert"


class RouterForm(NamedTuple):
    """A `RouterForm` holds the settings of a router that its gradients depend on."""

    score: str
    normalize: bool
    scale: float
    top_k: int
    num_experts: int
    chosen_suffice: bool  # the gradient of the weights reads the chosen logits alone
    balance_loss: float
    z_loss: float

    @property
    def weights(self) -> tuple[str, bool, float]:
        """The options of the kernels of the weights."""
        return self.score, self.normalize, self.scale

    @property
    def losses(self) -> tuple[int, str, float, float]:
        """The options of the kernels of the losses."""
        return self.top_k, self.score, self.balance_loss, self.z_loss


class RouterSaved(NamedTuple):
    x: Tensor | None  # (T, D)
    weight: Tensor | None  # the parameter itself
    logits: Tensor | None  # (T, E) float32, or (T, K) of the chosen experts where those are enough
    experts: Tensor | None  # (T, K) int32
    load: Tensor | None  # (E,) int32: the copies of each expert, where there is a balance loss
    share: Tensor | None  # (): the factor of this rank's loss, where the loss is over many ranks
    form: RouterForm | None  # of the forward: attributes may change before the backward


class Router(Op[RouterSaved]):
    """A `Router` chooses the top k experts of each token.   x (T, D) passes through; publishes `experts` (T, K) int32,
    `weights` (T, K) float32, and `router_loss` () float32 where a loss is asked for.

    logits = x W^T (+ b) in float32, s = softmax(logits) or sigmoid(logits); the experts are the top k of s
    (+ expert_bias), weights = scale * s[experts], divided by their sum + 1e-20 if `normalize`.

    score: "softmax" or "sigmoid". With softmax and normalize the weights are the softmax over the chosen experts alone,
        as in Mixtral.
    bias: a learned one, added to the logits.
    expert_bias: a buffer (E,) that is added to the scores for the choice alone, and has no gradient; it starts at
        zero, MoE counts what it does, and `update_expert_bias` moves it (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    groups, top_groups: experts stand in `groups` groups of equal size, and a token chooses among those of its
        `top_groups` best, by the sum of the two best scores (plus expert_bias) in each (the same, section 2.1.2).
    balance_loss, z_loss: coefficients of the losses of the Switch Transformer (arXiv 2101.03961, eq. 4) and of ST-MoE
        (arXiv 2202.08906, eq. 5), over the tokens of one call; None leaves a loss out.
    given_experts: the experts are not chosen but read from the side input `chosen` (T, K) int32, as of another run.
    Raises FuseOpsError for options that do not fit together, ShapeError for another x or `chosen`.
    Ties go to the lower expert. weight (E, D) is initialised as torch.nn.Linear is.
    """

    losses = ("router_loss",)
    integers = frozenset({"experts"})
    floats = True
    stays_high = CHOICE_STAYS_HIGH
    saves_for = {
        "x": ("weight", "logits", "experts", "load", "share", "form"),
        "weight": ("x", "logits", "experts", "load", "share", "form"),
        "bias": ("logits", "experts", "load", "share", "form"),
    }

    over: Any = None  # a DeviceMesh of one dimension: losses and expert_bias are over the tokens of all its ranks
    expert_bias: Tensor | None
    tokens_per_expert: Tensor | None  # counted since the last update

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        expert_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        balance_loss: float | None = None,
        z_loss: float | None = None,
        given_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_numbers("Router", scale=scale)
        check_flags("Router", bias=bias, expert_bias=expert_bias, given_experts=given_experts)
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.score, self.normalize, self.scale = score, normalize, float(scale)
        self.groups, self.top_groups = groups, top_groups
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self._check()
        self.reads = ("chosen",) if given_experts else ()
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        own = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        correction = torch.zeros(num_experts, device=device) if expert_bias else None
        self.register_buffer("expert_bias", correction)
        # no buffer: DDP would overwrite it with the counts of rank 0
        none = None if correction is None else torch.zeros_like(correction, dtype=torch.int64)
        self.tokens_per_expert = none
        self.reset_parameters()

    @property
    def writes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The published side tensors; the loss is one of them once a coefficient is set."""
        loses = self.balance_loss is not None or self.z_loss is not None
        return WITH_LOSS if loses else WITHOUT_LOSS

    def _check(self) -> None:
        whole = ("num_experts", "top_k", "groups", "top_groups")
        check_integers("Router", **{name: getattr(self, name) for name in whole})
        check_integers("Router", 1, dim=self.dim, num_experts=self.num_experts)
        check_flags("Router", normalize=self.normalize)
        if not 1 <= self.top_k <= self.num_experts:
            raise FuseOpsError(
                f"Router: top_k is {self.top_k}, expected 1 to {self.num_experts}, the number of experts."
            )
        for name in ("balance_loss", "z_loss"):
            given = getattr(self, name)
            if given is not None and not is_number(given):
                raise FuseOpsError(
                    f"Router: {name} is {shown(given)}, expected a finite number or None."
                )
        if self.score not in SCORES:
            raise FuseOpsError(f"Router: score is {shown(self.score)}, expected one of {SCORES}.")
        if not 1 <= self.top_groups <= self.groups or self.num_experts % self.groups:
            raise FuseOpsError(
                f"Router: groups is {self.groups} and top_groups {self.top_groups}, expected groups that divide the "
                f"{self.num_experts} experts, and top_groups from 1 to groups."
            )
        if self.top_k > self.top_groups * (self.num_experts // self.groups):
            raise FuseOpsError(
                f"Router: {self.top_groups} of {self.groups} groups hold "
                f"{self.top_groups * (self.num_experts // self.groups)} experts, fewer than top_k = {self.top_k}."
            )

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.dim)
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)
        if self.tokens_per_expert is not None:
            nn.init.zeros_(self.tokens_per_expert)

    def extra_repr(self) -> str:
        said = [f"{self.dim}, {self.num_experts}, top_k={self.top_k}, score={self.score!r}"]
        said += changed_options(self, normalize=True, scale=1.0, groups=1, top_groups=1)
        said += changed_options(self, balance_loss=None, z_loss=None)
        said += ["bias=True"] * (self.bias is not None)
        said += ["expert_bias=True"] * (self.expert_bias is not None)
        return ", ".join(said + ["given_experts=True"] * bool(self.reads))

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.dim)
        return shape

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move and cast as any module does, but keep expert_bias in float32: its steps are small."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        counted = self.tokens_per_expert
        if counted is not None:
            self.tokens_per_expert = fn(counted)
            if counted.is_meta:  # `to_empty`: no state_dict will fill it
                self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert)
        after = self.expert_bias
        if before is not None and after is not None and after.itemsize < before.itemsize:
            self.expert_bias = before.to(after.device)
        return self

    def with_given_experts(self) -> "Router":
        """This router, with the same parameters, that reads the experts from the side input `chosen`."""
        new = copy.copy(self)
        new._parameters, new._buffers = dict(self._parameters), dict(self._buffers)
        new.reads = ("chosen",)
        return new

    @torch.no_grad()
    def count(self, experts: Tensor) -> None:
        """Add the copies of each expert to `tokens_per_expert`, unless a checkpoint recomputes.   experts (T, K)"""
        if self.tokens_per_expert is not None:
            K.count_once(self.tokens_per_expert, experts)

    @torch.no_grad()
    def update_expert_bias(self, rate: float = 1e-3, group: Any = None) -> None:
        """Raise the bias of experts with a load below the mean by `rate`, and lower that of the others: once a step.

        The load counts copies since the last update. group: the process group that sums it, by default that of `over`.
        Raises FuseOpsError without an expert_bias, and for a rate that is no finite number from 0 on. Only the sum is
        waited for.
        """
        check_numbers("Router.update_expert_bias", 0, rate=rate)
        kinds = (torch.distributed.ProcessGroup, NoneType)
        instance_of(group, kinds, "Router.update_expert_bias(group)", "a process group, or None")
        if self.expert_bias is None or self.tokens_per_expert is None:
            raise FuseOpsError(
                "Router has no expert_bias to update: Router(..., expert_bias=True)."
            )
        if group is None and self.over is not None:
            group = self.over.get_group()
        if group is not None:
            torch.distributed.all_reduce(self.tokens_per_expert, group=group)
        load = self.tokens_per_expert.to(self.expert_bias)
        self.expert_bias.add_((load.mean() - load).sign(), alpha=float(rate))
        self.tokens_per_expert.zero_()

    # --- forward

    def fwd(
        self,
        x: Tensor,
        *,
        weight: Tensor,
        bias: Tensor | None,
        expert_bias: Tensor | None,
        chosen: Tensor | None = None,
        call: Call,
    ) -> Out:
        groups = self.groups, self.top_groups
        if not (
            self.score in SCORES
            and 1 <= self.top_groups <= self.groups
            and 1 <= self.top_k <= self.num_experts // self.groups * self.top_groups
        ):
            self._check()  # options may be assigned
        check_rows(self, x)
        logits = K.wide_mm(x, weight)
        logits = logits if bias is None else logits + bias.to(logits.dtype)
        form, loses = self._form(), "router_loss" in self.writes
        if chosen is None:
            found = K.router_fwd(logits, self.top_k, *form.weights, expert_bias, *groups)
            weights, experts, picked = found
        else:
            experts = self._given_experts(x, chosen)
            at, scores = experts.long(), scores_of(logits, self.score)
            weights = weights_of(scores, at, self.normalize, self.scale)
            picked = logits.gather(-1, at)
        load = share = None
        if self.balance_loss is not None or (loses and self.over is not None):
            load = K.expert_counts(experts, self.num_experts)
        if load is not None and self.over is not None:
            load, share = over_ranks(load, experts, self.over, logits.dtype)
        side = {"experts": experts, "weights": weights}
        if loses:
            loss = K.router_loss(logits, load, *form.losses)
            side["router_loss"] = loss if share is None else loss * share.to(loss.dtype)
        if form.chosen_suffice:
            logits = picked
        return Out(x, RouterSaved(x, weight, logits, experts, load, share, form), side)

    def _form(self) -> RouterForm:
        # a normalised softmax is the softmax over the chosen logits
        alone = self.score == "sigmoid" or (self.normalize and self.expert_bias is None)
        return RouterForm(
            *(self.score, self.normalize, self.scale, self.top_k, self.num_experts),
            alone and "router_loss" not in self.writes,
            *(self.balance_loss or 0.0, self.z_loss or 0.0),
        )

    def _given_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        if chosen.shape != (x.shape[0], self.top_k):
            raise ShapeError(
                f"Router expects chosen of shape {(x.shape[0], self.top_k)}, the experts of each token, got "
                f"{tuple(chosen.shape)}."
            )
        check_experts(chosen, self.num_experts)
        return chosen.to(torch.int32)

    # --- backward

    def bwd(
        self, saved: RouterSaved, dy: Tensor | None, *, dside: dict[str, Tensor | None], call: Call
    ) -> Grads:
        x, weight, logits, experts, load, share, known = saved
        if dside["weights"] is None and dside.get("router_loss") is None:
            return Grads(dy, {"weight": None, "bias": None})
        form: RouterForm = known  # type: ignore[assignment]
        dloss = dside.get("router_loss")
        exact = dloss is not None or "bias" in call.needs
        dtype = None if exact else _common_dtype(x, weight)
        dlogits = _dlogits(dside["weights"], logits, experts, form, dtype)  # type: ignore[arg-type]
        if dloss is not None:
            dloss = dloss if share is None else dloss * share.to(dloss.dtype)
            dlogits = K.router_loss_bwd(dlogits, logits, load, dloss, *form.losses)  # type: ignore[arg-type]
        params: dict[str, Tensor | None] = {}
        if "bias" in call.needs:
            params["bias"] = dlogits.sum(0)
        # With halves the products are those of halves: dlogits is rounded as any gradient is.
        if "weight" in call.needs:
            params["weight"] = K.wide_mm(dlogits.to(x.dtype).t(), x.t())  # type: ignore[union-attr]
        return Grads(_dx(dlogits, weight, dy) if "x" in call.needs else None, params)  # type: ignore[arg-type]


def over_ranks(
    load: Tensor, experts: Tensor, mesh: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(load, share) for the loss over the N tokens of all W ranks, T of which are on this one.

    load (E,): the copies of each expert on all ranks, times T / N, since the loss formula divides by T.
    share (): W T / N, the factor with which the mean of the ranks' losses is the loss over all tokens.
    """
    total = load.clone()
    if not (total.is_meta or torch_private.is_fake(total)):
        torch.distributed.all_reduce(total, group=mesh.get_group())
    share = experts.numel() / total.sum().clamp(min=1).double()
    return (total * share).to(dtype), share * mesh.size()


def _dlogits(
    dweights: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    form: RouterForm,
    dtype: torch.dtype | None,
) -> Tensor:
    """The part of the logits' gradient from the weights.   (T, E), in float32 or `dtype`"""
    if dweights is None:
        return torch.zeros_like(logits)
    width = form.num_experts if form.chosen_suffice else 0
    return K.router_bwd(dweights, logits, experts, *form.weights, width, dtype)


def _common_dtype(x: Tensor | None, weight: Tensor | None) -> torch.dtype | None:
    """The dtype of x and weight, by which dlogits is multiplied; None where they differ."""
    found = {t.dtype for t in (x, weight) if t is not None}
    return found.pop() if len(found) == 1 else None


def _dx(dlogits: Tensor, weight: Tensor, dy: Tensor | None) -> Tensor:
    """dy + dlogits @ weight."""
    return dlogits.to(weight.dtype) @ weight if dy is None else K.add_mm(dy, dlogits, weight)
