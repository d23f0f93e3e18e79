"""LinearCrossEntropy computes the loss of a language model's head, without its logits in memory.

Shapes: x (..., D), weight (V, D), bias (V,), targets (...) int64 -> () or, with reduction="none", (...) float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.arguments import check_flags, check_integers
from fuseops.errors import FuseOpsError, ShapeError

from .checks import check_targets, check_tensors, check_width
from .loss_options import CHUNK_BYTES, IGNORED, LOGITS_STAY_HIGH, ROWS, LossOptions
from .object_table import ObjectTable
from .op import Call, Grads, Op, Out, Shape, changed_options
from .vocab_parallel import (
    ChunkedStep,
    PartialSoftmax,
    ShardedLoss,
    TokenGrads,
    Vocabulary,
    check_layout,
    vocabulary_over,
)


class LinearCrossEntropySaved(NamedTuple):
    # with gradients="forward"
    dx: Tensor | None = None  # (..., D) in the dtype of x
    dweight: Tensor | None = None  # (V, D) float32
    dbias: Tensor | None = None  # (V,) float32
    unit: Tensor | None = None  # () float32: the power of two that they are multiplied by
    # with gradients="backward"
    x: Tensor | None = None  # (..., D)
    weight: Tensor | None = None  # the parameter itself
    bias: Tensor | None = None  # the parameter itself
    targets: Tensor | None = None  # (...) int64
    class_weights: Tensor | None = None  # (V,), the buffer itself
    total: Tensor | None = None  # () float32: the divisor of the sum of the rows' losses
    lse: Tensor | None = None  # (N,) float32
    expected: Tensor | None = None  # (N,) float32: the mean logit; entropy = lse - expected
    # (ranks, 3 or 4, N) float32, of a sharded vocabulary; lse and expected are then of the local classes
    gathered: Tensor | None = None
    ends: tuple[list[float], int, int] | None = None  # the kernels' options


class Called(NamedTuple):
    """A `Called` is what users call the loss and its operands, which messages name so."""

    who: str
    x: str = "x"
    weight: str = "weight"
    bias: str = "bias"
    targets: str = "targets"
    class_weights: str = "class weights"


class LinearCrossEntropy(Op[LinearCrossEntropySaved]):
    """loss = cross entropy of the logits x W^T + b.   x (..., D), side input targets (...) int64 -> loss, float32

    As `torch.nn.functional.linear_cross_entropy` and, in parameters and defaults, `torch.nn.CrossEntropyLoss`; logits
    are made for a chunk of tokens at a time (`chunk_bytes` of them), and never whole. Of a token with target t

        loss = -(1 - label_smoothing) w_t log p_t - label_smoothing / V sum_c w_c log p_c + z_loss lse^2

    with p the softmax of l = soft_cap tanh(logits / soft_cap) / temperature and lse = log sum exp l (PaLM,
    arXiv 2204.02311, for z_loss; Gemma 2, arXiv 2408.00118, for soft_cap). It is 0 for a target of `ignore_index`, -100
    unless given. Another one outside of the vocabulary is refused on the CPU; on a device, where nothing waits to look,
    and in compiled code its loss is NaN.

    weight         (V,) weights w of the classes, kept as the buffer `class_weights`; None is 1 for each
    reduction      "mean" (over the weights of the targets that count; 0 of no tokens, NaN where all are ignored),
                   "sum" or "none"
    publishes      names among "lse", "log_probs" (of the targets) and "entropy": side outputs of shape (...), float32,
                   with gradients
    gradients      "forward": made with the loss, 6 N D V operations in all, where the loss is one number and nothing is
                   published; "backward": made later from lse, 8 N D V. None picks the first where it can
    chunk_bytes    the most that logits may take at a time
    targets        the name that the Sequential knows the targets by

    With a weight (and bias) that is a DTensor, `Shard(0)` over a mesh of one dimension, each rank computes with its
    classes, and all get the loss: x, targets and class weights are plain then, the same on every rank, and the gradient
    of x is added up. As under `torch.distributed.tensor.parallel.loss_parallel`, without its logits. With
    gradients="forward" what a chunk exchanges travels while the next one is multiplied.

    Products are in the dtype of x and weight (of autocast inside it), softmax and sums in float32. The gradient of the
    weight is summed over chunks in float32, into `main_grad` where there is one. Nothing of it is made without a need.
    Raises FuseOpsError for unknown options, ShapeError for other shapes or dtypes.
    """

    reads: tuple[str, ...] = ("targets",)
    integers = frozenset({"targets"})
    floats = True
    autocast = True
    live_call = True
    stays_high = LOGITS_STAY_HIGH

    called = Called("LinearCrossEntropy")

    vocabulary: Vocabulary | None = None
    """The sharding of the classes, where weight and bias are this rank's shard."""

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        bias: bool = False,
        *,
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        soft_cap: float | None = None,
        temperature: float = 1.0,
        reduction: str = "mean",
        publishes: tuple[str, ...] = (),
        gradients: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        targets: str = "targets",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ignored = IGNORED if ignore_index is None else ignore_index
        options = LossOptions(
            ignored, label_smoothing, z_loss, soft_cap, temperature, reduction, publishes, gradients,
            chunk_bytes,
        )  # fmt: skip
        self._set_options(options)
        self.rename(targets=targets)
        check_integers("LinearCrossEntropy", 0, in_features=in_features, vocab_size=vocab_size)
        check_flags("LinearCrossEntropy", bias=bias)
        self.in_features, self.vocab_size = in_features, vocab_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(vocab_size, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(vocab_size, **factory)) if bias else None
        if weight is not None:
            check_tensors("LinearCrossEntropy", weight=weight)
            _refuse_gradient("LinearCrossEntropy", weight)
        if weight is not None and weight.shape != (vocab_size,):
            raise ShapeError(
                f"LinearCrossEntropy expects weight, one number a class, of shape ({vocab_size},), got "
                f"{tuple(weight.shape)}."
            )
        self.register_buffer("class_weights", weight)
        self.reset_parameters()

    def _set_options(self, options: LossOptions) -> None:
        options.check()
        publishes = options.publishes
        self.ignore_index, self.chunk_bytes = options.ignore_index, options.chunk_bytes
        self.label_smoothing, self.z_loss = options.label_smoothing, options.z_loss
        self.soft_cap, self.temperature = options.soft_cap, options.temperature
        self._reduction = options.reduction
        self.writes = tuple(publishes)
        self._requested_gradients, self._gradients = options.gradients, options.gradient_pass
        made = {
            "x": ("dx", "unit"),
            "weight": ("dweight", "weight", "unit"),
            "bias": ("dbias", "bias", "unit"),
        }
        rows = ["x", "weight", "bias", "targets", "class_weights", "total", "lse", "ends"]
        rows += ["gathered", "expected"] if publishes else ["gathered"]
        self.saves_for = made if self.gradients == "forward" else dict.fromkeys(made, tuple(rows))

    @property
    def reduction(self) -> str:
        """Read-only, as `gradients`: the saved fields depend on both."""
        return self._reduction

    @property
    def gradients(self) -> str:
        return self._gradients

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            bound = self.in_features**-0.5
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        said = f"{self.in_features}, {self.vocab_size}, bias={self.bias is not None}"
        options = changed_options(self._options, **LossOptions()._asdict())
        return ", ".join([said, *options, *self.renamed()])

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.in_features)
        return shape[:-1] if self.reduction == "none" else ()

    # --- forward

    def fwd(
        self,
        x: Tensor,
        *,
        weight: Tensor,
        bias: Tensor | None,
        class_weights: Tensor | None,
        targets: Tensor,
        call: Call,
    ) -> Out:
        if torch_private.is_dtensor(type(weight)):  # no parallel style was applied
            w, b = call.precision.cast(weight), call.precision.cast(bias)
            options: Any = {"linear_bias": b, "weight": class_weights, **self._options._asdict()}
            found = linear_cross_entropy(x, w, targets, **options)  # type: ignore[arg-type]
            loss, *rest = found if isinstance(found, tuple) else (found,)
            side = dict(zip(self.writes, rest, strict=True))
            return Out(loss, LinearCrossEntropySaved(), side or None)
        if not torch.compiler.is_compiling():
            self._options.check()  # they may be assigned
        classes = weight.shape.numel() if weight.dim() == 0 else len(weight)
        classes = classes if self.vocabulary is None else self.vocabulary.total
        called = self.called
        check_operands(called, x, weight, bias, class_weights, classes)
        self._check_targets(x, targets, classes)
        w, b = call.precision.cast(weight), call.precision.cast(bias)
        if x.dtype != w.dtype:  # type: ignore[union-attr]
            raise ShapeError(
                f"{called.who} expects {called.x} and {called.weight} of one dtype, got {x.dtype} and {w.dtype}."  # type: ignore[union-attr]
            )
        rows, at = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        args: Any = rows, w, b, at
        total = self._total(at, class_weights, K.accumulator(x.dtype))
        # over ranks, plain torch (`fo.reference()`) differentiates the tokens' losses
        plain = self.vocabulary is not None and torch.is_grad_enabled()
        if self.gradients == "forward" and call.needs and not plain:
            needs = [name in call.needs for name in ("x", "weight", "bias")]
            unit = _unit(total)
            loss, *made = self._with_grads(args, class_weights, unit / total, needs)
            dx, dw, db = (t if need else None for t, need in zip(made, needs, strict=True))
            dx = None if dx is None else dx.view(x.shape)
            saved = LinearCrossEntropySaved(dx, dw, db, unit, weight=weight, bias=bias)
            return Out((loss / total).sum(), saved)
        loss, published, numbers = self._token_losses(args, class_weights)
        y = loss.view(targets.shape) if self.reduction == "none" else (loss / total).sum()
        side = {name: published[name].view(targets.shape) for name in self.writes}
        saved = LinearCrossEntropySaved(
            x=x, weight=weight, bias=bias, targets=targets, class_weights=class_weights,
            total=total, ends=self._kernel_args, **numbers,
        )  # fmt: skip
        return Out(y, saved, side or None)

    def _with_grads(
        self, args: Any, class_weights: Tensor | None, dloss: Tensor, needs: list[bool]
    ) -> Any:
        """The loss of each token, dx, dweight and dbias.   args: (x, weight, bias, targets).  dloss: ()"""
        dloss = dloss.expand(len(args[0]))
        if self.vocabulary is not None:
            sharded = ShardedLoss(self.vocabulary, self._options, class_weights)
            step: Any = *args, dloss, needs
            return ChunkedStep(sharded, *step).run()
        of_rows: Any = *args, class_weights, *self._kernel_args, dloss, needs
        return K.linear_cross_entropy_grads(*of_rows)

    def _token_losses(
        self, args: Any, class_weights: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(loss of each token, publishable numbers by name, saved numbers by name).   args: as of `_with_grads`"""
        if self.vocabulary is not None:
            sharded = ShardedLoss(self.vocabulary, self._options, class_weights)
            loss, published, numbers = sharded.fwd(*args)
            return loss, published, numbers._asdict()
        of_rows: Any = *args, class_weights, *self._kernel_args
        loss, lse, logp, expected = K.linear_cross_entropy_fwd(*of_rows)
        published = {"lse": lse, "log_probs": logp, "entropy": lse - expected}
        return loss, published, {"lse": lse, "expected": expected}

    @property
    def _options(self) -> LossOptions:
        """The options from the op's attributes, which may be assigned."""
        own: dict[str, Any] = {"publishes": self.writes, "gradients": self._requested_gradients}
        names = LossOptions._fields
        return LossOptions(**own, **{n: getattr(self, n) for n in names if n not in own})

    @property
    def _kernel_args(self) -> Any:
        """The kernels' options, ignore_index and chunk_bytes."""
        return self._options.kernel_options, self.ignore_index, self.chunk_bytes

    def _check_targets(self, x: Tensor, targets: Tensor, classes: int) -> None:
        if targets.shape != x.shape[:-1] or targets.dtype != torch.int64:
            raise ShapeError(
                f"{self.called.who} expects {self.called.targets} int64 of shape {tuple(x.shape[:-1])}, the class of "
                f"each token, got {targets.dtype} of shape {tuple(targets.shape)}."
            )
        if torch_private.is_dtensor(type(targets)):
            raise FuseOpsError(
                f"{self.called.who} takes plain targets beside a plain x, those of all its tokens, got a DTensor: "
                "targets.full_tensor()."
            )
        check_targets(self.called.who, targets, classes, self.ignore_index)

    def _total(self, targets: Tensor, class_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The divisor of the sum of the rows' losses.   ()"""
        if self.reduction != "mean":
            return torch.ones((), dtype=dtype, device=targets.device)
        counts = targets != self.ignore_index
        if class_weights is None:
            return counts.sum().to(dtype)
        known = targets.clamp(0, len(class_weights) - 1)
        return (counts * class_weights[known].to(dtype)).sum()

    # --- backward

    def bwd(
        self,
        saved: LinearCrossEntropySaved,
        dy: Tensor | None,
        *,
        dside: dict[str, Tensor | None],
        call: Call,
    ) -> Grads:
        if saved.ends is None:
            return self._scaled_forward_grads(saved, dy, call)
        return self._recomputed_grads(saved, dy, dside, call)

    def _scaled_forward_grads(self, saved: LinearCrossEntropySaved, dy: Any, call: Call) -> Grads:
        """The gradients of the forward, times that of the loss."""
        dy = dy / saved.unit
        params: dict[str, Tensor | None] = {}
        for name, made, owner in (
            ("weight", saved.dweight, saved.weight),
            ("bias", saved.dbias, saved.bias),
        ):
            if name not in call.needs:
                continue
            main_grad = (call.out or {}).get(name)
            if main_grad is not None and name not in call.overwrite:
                params[name] = None
                main_grad.addcmul_(made, dy)  # type: ignore[arg-type]
            else:
                params[name] = K.scaled_to(made, dy, owner.dtype)  # type: ignore[arg-type, union-attr]
        dx = K.scaled_to(saved.dx, dy, saved.dx.dtype) if "x" in call.needs else None  # type: ignore[arg-type, union-attr]
        return self._split_by_owner(dx, params)

    def _split_by_owner(self, dx: Tensor | None, grads: dict[str, Tensor | None]) -> Grads:
        """`Grads` of gradients by name: side inputs, as of a weight that the caller gave, apart from parameters."""
        side = {name: t for name, t in grads.items() if name in self.reads}
        return Grads(dx, {n: t for n, t in grads.items() if n not in side}, side)

    def _recomputed_grads(
        self,
        saved: LinearCrossEntropySaved,
        dy: Tensor | None,
        dside: dict[str, Tensor | None],
        call: Call,
    ) -> Grads:
        """The gradients, from recomputed logits."""
        x, lse, total = map(_require_saved, (saved.x, saved.lse, saved.total))
        rows, targets = x.reshape(-1, x.shape[-1]), _require_saved(saved.targets).reshape(-1)
        zero = torch.zeros_like(lse)
        dloss = zero if dy is None else (dy.reshape(-1) / total).to(zero.dtype).expand_as(lse)
        given = (dside.get(name) for name in ROWS)
        d = TokenGrads(dloss, *(zero if t is None else t.reshape(-1) for t in given))
        w: Any = call.precision.cast(_require_saved(saved.weight))
        b = call.precision.cast(saved.bias)
        needs = [name in call.needs for name in ("x", "weight", "bias")]
        main_grad = (call.out or {}).get("weight")
        if main_grad is not None and (main_grad.dtype != zero.dtype or "weight" in call.overwrite):
            main_grad = None
        expected = lse if saved.expected is None else saved.expected
        made: Any
        if self.vocabulary is not None:
            main_grad = None
            sharded = ShardedLoss(self.vocabulary, self._options, saved.class_weights)
            numbers = PartialSoftmax(lse, expected, _require_saved(saved.gathered))
            made = sharded.bwd(d, numbers, rows, w, b, targets, needs)
        else:
            grads = [dloss]
            if saved.expected is not None:
                grads = [dloss, d.lse + d.entropy, d.log_probs, -d.entropy]
            of_rows: Any = rows, w, b, targets, saved.class_weights, *_require_saved(saved.ends)
            of_rows = *of_rows, lse, expected, grads, needs, main_grad
            made = K.linear_cross_entropy_bwd(*of_rows)
        dx, dw, db = made
        params = {
            "weight": dw if needs[1] and main_grad is None else None,
            "bias": db if needs[2] else None,
        }
        return self._split_by_owner(dx.view(x.shape) if needs[0] else None, params)


def check_operands(
    called: Called,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None = None,
    classes: int | None = None,
) -> None:
    """Raise ShapeError unless x and the weight are equally wide, and bias and class weights have one number a class.

    classes: of the whole vocabulary, which class weights cover where weight and bias are a shard
    """
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ShapeError(
            f"{called.who} expects {called.x} (..., D) and {called.weight} (V, D), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    per_class = (called.bias, bias, len(weight)), (called.class_weights, class_weights, classes)
    for name, t, count in per_class:
        if t is not None and (t.shape != (count,) or not t.is_floating_point()):
            raise ShapeError(
                f"{called.who} expects {name} of a float dtype and shape ({count},), got {t.dtype} of "
                f"shape {tuple(t.shape)}."
            )


def _refuse_gradient(who: str, weight: Tensor) -> None:
    if weight.requires_grad:
        raise FuseOpsError(
            f"{who}: weight wants a gradient and would get none, as in torch: detach it."
        )


def _require_saved(t: Any) -> Any:
    """A saved field that must not be None."""
    if t is None:
        raise FuseOpsError("LinearCrossEntropy.bwd reads what was not saved.")
    return t


def _unit(total: Tensor) -> Tensor:
    """The power of two by which the forward scales its gradients, and which the backward divides out.

    float16 cannot hold gradients divided by a count of tokens, and a GradScaler's factor comes only in the backward.
    """
    return torch.ldexp(torch.ones_like(total), torch.frexp(total).exponent - 1)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    publishes: tuple[str, ...] = (),
    gradients: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Any:
    """`LinearCrossEntropy` on a given weight, such as that of an `lm_head` or of a tied embedding.

    Arguments as of `torch.nn.functional.linear_cross_entropy`: input (..., D), linear_weight (V, D), target (...)
    int64, linear_bias (V,), weight (V,); the others as of the op. -> the loss, with `publishes` a tuple of it and those
    Raises ShapeError for other shapes or dtypes, FuseOpsError for unknown options.
    """
    others = {"linear_bias": linear_bias, "weight": weight}
    others = {name: t for name, t in others.items() if t is not None}
    check_tensors(
        "linear_cross_entropy", input=input, linear_weight=linear_weight, target=target, **others
    )
    if not input.is_floating_point():
        raise ShapeError(f"linear_cross_entropy expects input of a float dtype, got {input.dtype}.")
    ignored = IGNORED if ignore_index is None else ignore_index
    published = tuple(publishes) if isinstance(publishes, list | set) else publishes
    options = LossOptions(
        ignored, label_smoothing, z_loss, soft_cap, temperature, reduction, published, gradients,
        chunk_bytes,
    )  # fmt: skip
    if weight is not None:
        _refuse_gradient("linear_cross_entropy", weight)
    mesh, total = None, 0
    if torch_private.is_dtensor(type(linear_weight)):
        check_layout(linear_weight, linear_bias)
        w: Any = linear_weight
        b: Any = linear_bias
        mesh, total = w.device_mesh, w.shape[0]
        linear_weight, linear_bias = w.to_local(), None if b is None else b.to_local()
    given = {"weight": linear_weight, "bias": linear_bias, "class_weights": weight}
    side = {name: t for name, t in given.items() if t is not None}
    try:
        op = _OPS[_cached_op(tuple(side), mesh, total, *options)]
    except TypeError:  # an option that has no hash is none of those that it may be
        options.check()
        raise
    return op(input, targets=target, **side)


class _OnGivenWeight(LinearCrossEntropy):
    """An `_OnGivenWeight` is a `LinearCrossEntropy` whose weight and bias are side inputs."""

    called = Called(
        "linear_cross_entropy",
        "input",
        "linear_weight",
        "linear_bias",
        "target",
        "weight, the class weights",
    )

    def __init__(
        self, names: tuple[str, ...], vocabulary: Vocabulary | None, options: LossOptions
    ) -> None:
        Op.__init__(self)
        self.vocabulary = vocabulary
        self._set_options(options)
        self.reads = ("targets", *names)
        self.weight = self.bias = self.class_weights = None  # type: ignore[assignment]

    def extra_repr(self) -> str:
        return f"given {', '.join(self.reads)}"

    def out_shape(self, shape: Shape) -> Shape:
        return shape[:-1] if self.reduction == "none" else ()


MAX_CACHED_OPS = 64  # an option may be another in each step


_OPS = ObjectTable()  # of `linear_cross_entropy`
_numbers: dict[tuple[Any, ...], int] = {}  # of these ops, by their options


@torch_private.assume_constant_result
def _cached_op(reads: tuple[str, ...], mesh: Any, classes: int, *options: Any) -> int:
    """The number of the op with these options. Dynamo cannot create modules, so it does not trace this."""
    key = reads, mesh, classes, *options
    if key not in _numbers:
        if len(_numbers) >= MAX_CACHED_OPS:
            _OPS.drop([_numbers.pop(next(iter(_numbers)))])
        vocabulary = None if mesh is None else vocabulary_over(mesh, classes)
        _numbers[key] = _OPS.add(_OnGivenWeight(reads, vocabulary, LossOptions(*options)))
    return _numbers[key]
