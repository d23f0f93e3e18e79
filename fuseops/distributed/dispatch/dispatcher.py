"""The interface of a dispatcher, which sends tokens to the ranks of their experts, and its common parts.

W ranks hold L = E / W experts each, in order. A token goes once to each rank that has any of its K experts, with the
ids that they have there and their weights; one partial sum comes back from each, and the sums are added in the order of
ranks.
T: this rank's tokens.  C: tokens that it receives, in the order of ranks and of their tokens.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.distributed.pairs import FORWARD, give_way
from fuseops.errors import FuseOpsError
from fuseops.observe.travel import travel

from . import lost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReceivedTokens(NamedTuple):
    """A `ReceivedTokens` holds the tokens of all ranks that are routed to an expert of this one, and the way back."""

    x: Tensor  # (C, D)
    experts: Tensor  # (C, K) int32: ids among the local experts, -1 for one of another rank
    weights: Tensor  # (C, K)
    rows: int  # rows of the grouped GEMMs: an upper bound of the local copies
    slots: Tensor  # (T, W) int32: index of a token among those sent to a rank, -1 if it is not sent there
    arrivals: Tensor  # what the dispatcher needs for the way back, in a shape of its own
    ready: Callable[[], Any] | None = None  # waits for x, if it is in flight

    def wait(self) -> ReceivedTokens:
        """These, once x has arrived."""
        if self.ready is not None:
            give_way(FORWARD)
            self.ready()
        return self._replace(ready=None)


UNKNOWN = -1  # of `Dispatcher.gradients`: in compiled code


def check_mesh(mesh: DeviceMesh, num_experts: int) -> None:
    """Raise FuseOpsError for a mesh over which the experts cannot be sharded."""
    if mesh.ndim != 1:
        raise FuseOpsError(
            f"experts are spread over a mesh of one dimension, got {mesh.ndim}: pass mesh['ep']."
        )
    if num_experts % mesh.size():
        raise FuseOpsError(
            f"{num_experts} experts over {mesh.size()} ranks: the ranks must divide them."
        )


def check_row_sizes(sizes: Iterable[int]) -> None:
    """Raise FuseOpsError if ranks send rows of different sizes in bytes."""
    found = sorted({*sizes})
    if len(found) > 1:
        raise FuseOpsError(
            f"ExpertDispatch: ranks send rows of {' and '.join(map(str, found))} bytes, expected one size. Run the "
            "layer on all ranks with one dtype, under one recipe and on one kind of GPU."
        )


_dispatchers: list[Dispatcher] = []


def dispatcher_of(number: int) -> Dispatcher:
    """The dispatcher with a number, which may be a symbol in compiled code."""
    return _dispatchers[int(number)]


class Dispatcher(abc.ABC):
    """A `Dispatcher` sends tokens to the ranks of their experts and partial sums back, over a mesh of one dimension.

    All ranks call `dispatch`, `collect` and their backwards alike: they are collectives. The state of a micro-batch is
    in two tensors, `slots` and `arrivals`, so that checkpoints, pipelines and captured graphs see all of it.
    """

    name: str
    sums: torch.dtype | None = None  # dtype in which partial sums travel; None for that of the rows
    overlaps_compute = False  # whether tokens travel while other kernels run
    not_copied: frozenset[str] = frozenset()  # attributes that a copy or pickle leaves out
    path: str | None = None  # of the op that sends by it, once that is known
    # how many the backward of the dispatch that begins will send back: none, of x, of x and of weights
    gradients: int = UNKNOWN

    def __init__(self, mesh: DeviceMesh, num_experts: int, top_k: int) -> None:
        """num_experts: of all ranks.  Raises FuseOpsError for a mesh that does not divide them."""
        check_mesh(mesh, num_experts)
        self.mesh, self.num_experts, self.top_k = mesh, num_experts, top_k
        self.world, self.rank = mesh.size(), mesh.get_local_rank()
        self.local_experts = num_experts // self.world
        self._register()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self.not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        """Take a number, by which compiled code finds the dispatcher."""
        self.number = len(_dispatchers)
        _dispatchers.append(self)

    @property
    def kernel_resources(self) -> str:
        """A description of the resources that an overlapped transfer takes from other kernels, for `explain()`."""
        return ""

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def watch(self) -> None:
        """Name ranks that have ended in later errors (`lost`). A collective in the first call of a group."""
        lost.watch(self.group, poll=self.mesh.device_type == "cuda")

    @abc.abstractmethod
    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> ReceivedTokens:
        """Send tokens to their experts.   x (T, D), experts (T, K) int32, -1 for a dropped copy, weights (T, K)"""

    @abc.abstractmethod
    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """Send partial sums y (C, D) back.   -> (T, D), the sums of this rank's tokens"""

    @abc.abstractmethod
    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The backward of `dispatch`.   dx (C, D), dweights (C, K) or None -> (T, D), (T, K) or None"""

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Start `dispatch_bwd`.   -> a function that finishes it. This base finishes it at once."""
        found = self.dispatch_bwd(dx, dweights, experts, slots, arrivals)
        return lambda: found

    @abc.abstractmethod
    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        """The backward of `collect`.   dy (T, D) -> (C, D); tokens: C"""

    def begin_resend(
        self, x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int
    ) -> Callable[[], Tensor]:
        """Start sending x (T, D) again.   -> a function that returns the C rows. This base sends in that function."""
        return lambda: self.collect_bwd(x, slots, arrivals, tokens)

    @abc.abstractmethod
    def no_arrivals(self, x: Tensor) -> Tensor:
        """An uninitialised tensor of the shape and dtype of `arrivals`."""

    def expected_sizes(self, x: Tensor) -> tuple[int, int]:
        """C and `rows` if all ranks have as many tokens as x (T, D) and routing is even, for plans of one rank."""
        tokens = len(x)
        share = 1 - (1 - 1 / self.world) ** self.top_k
        return round(tokens * self.world * share), tokens * self.top_k

    def outside(self) -> dict[Any, int]:
        """As of `AcrossRanks`: bytes of its buffers, allocated or for the sizes of `expected_sizes`."""
        return {}

    def dry_run_rows(self, x: Tensor, rows: int) -> Tensor:
        """`rows` rows in the place of those that x becomes at the other end, for a dry run."""
        tokens = max(len(x), rows)  # the number at the experts, where a token is once per rank
        sent = tokens * (self.world - 1) // self.world
        return travel(x, rows, sent * x[:1].nbytes)

    def clamp_offs(self, offs: Tensor, rows: int) -> None:  # noqa: B027
        """Clamp offs of the local experts to `rows`, in place, if copies may overflow (`Bounded`)."""

    def end_forward(self) -> None:  # noqa: B027
        """End a `collect`, for what a dispatcher has to say of it (`Bounded`)."""

    def end_backward(self) -> None:  # noqa: B027
        """End a `dispatch_bwd`, likewise."""

    def target_ranks(self, experts: Tensor) -> Tensor:
        """(T, W) int32: the rank itself if it has an expert of the token, else -1."""
        every = torch.arange(self.world, dtype=torch.int32, device=experts.device)
        return torch.where(self.ranks_of_copies(experts)[:, :, None] == every, every, -1).amax(1)

    def ranks_of_copies(self, experts: Tensor) -> Tensor:
        """(T, K) int32: the rank of every copy's expert, -1 for a dropped copy."""
        return experts.div(self.local_experts, rounding_mode="floor").to(torch.int32)

    def local_ids(self, experts: Tensor, owner: Tensor) -> Tensor:
        """Ids on the ranks `owner` (S,) of experts (S, K) of tokens that are sent there, else -1.   -> (S, K) int32"""
        ids = experts.to(torch.int32) - owner[:, None].to(torch.int32) * self.local_experts
        return torch.where((ids >= 0) & (ids < self.local_experts) & (experts >= 0), ids, -1)

    def sum_returned(self, rows: Tensor, slots: Tensor) -> Tensor:
        """The sum of the rows that came back for each token, in the order of ranks."""
        return K.combine_fwd(rows, slots, K.one_group(len(rows), rows)[0])

    def weights_of_copies(self, by_slot: Tensor, experts: Tensor, slots: Tensor) -> Tensor:
        """Of values (S, K) that came back with the tokens, those of each copy from its expert's rank.   -> (T, K)"""
        ranks_of_copies = self.ranks_of_copies(experts)
        rows = slots.gather(1, ranks_of_copies.clamp(min=0).long()).long()
        rows = torch.where((ranks_of_copies >= 0) & (rows >= 0), rows, len(by_slot))
        padded = torch.cat([by_slot, by_slot.new_zeros(1, by_slot.shape[1])])
        return padded[rows, torch.arange(rows.shape[1], device=rows.device)]


def within_capacity(dispatcher: Dispatcher, experts: Tensor, factor: float) -> Tensor:
    """`experts` with -1 for every copy beyond the capacity of its expert: ceil(factor * T * K / E) over the tokens of
    all ranks, in the order of ranks, as one process with all tokens would drop them.   (T, K)
    """
    count, top_k = dispatcher.num_experts, experts.shape[1]
    offs, _, pos, _ = K.route(experts, count)
    mine = torch.cat([offs.diff(prepend=offs.new_zeros(1)), offs.new_full((1,), len(experts))])
    of_all = torch_private.all_gather(mine, 0, dispatcher.group).view(dispatcher.world, -1)
    copies = of_all[:, -1].sum() * top_k
    room = (copies.double() * factor / count).ceil().long()
    before = of_all[: dispatcher.rank, :-1].sum(0)
    first = torch.cat([offs.new_zeros(1), offs[:-1]])
    at = experts.clamp(min=0).long()
    kept = (pos >= 0) & (pos - first[at] + before[at] < room)
    return torch.where(kept, experts, -1)
