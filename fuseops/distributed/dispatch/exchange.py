"""How tokens travel to the ranks of their experts: the interface, and what every way of it begins with.

W ranks hold L = E / W experts each, in order. A token goes once to each rank that has any of its K experts, with the
ids that they have there and their weights; one partial sum comes back from each, and the sums are added in the order of
ranks.
T: tokens here.  C: tokens that arrive here, in the order of ranks and of their tokens.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
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


class Arrived(NamedTuple):
    """An `Arrived` holds the tokens of all ranks that are routed to an expert of this one, and how their sums find
    back.
    """

    x: Tensor  # (C, D)
    experts: Tensor  # (C, K) int32: ids among the experts here, -1 for one of another rank
    weights: Tensor  # (C, K)
    rows: int  # at least as many as there are copies here: the rows of the grouped GEMMs
    slots: Tensor  # (T, W) int32: where a token lies among those sent to a rank, -1 where it does not go
    arrivals: Tensor  # what the exchange needs to know of C on the way back
    ready: Callable[[], Any] | None = None  # called before x is read, where it is on its way

    def there(self) -> Arrived:
        """With x there."""
        if self.ready is not None:
            give_way(FORWARD)
            self.ready()
        return self._replace(ready=None)


def check_mesh(mesh: DeviceMesh, num_experts: int) -> None:
    """Raise FuseOpsError for a mesh that experts cannot be spread over."""
    if mesh.ndim != 1:
        raise FuseOpsError(
            f"experts are spread over a mesh of one dimension, got {mesh.ndim}: pass mesh['ep']."
        )
    if num_experts % mesh.size():
        raise FuseOpsError(
            f"{num_experts} experts over {mesh.size()} ranks: the ranks must divide them."
        )


_numbered: list[Exchange] = []


def numbered(number: int) -> Exchange:
    """The exchange of a number, which compiled code may have made a symbol."""
    return _numbered[int(number)]


class Exchange(abc.ABC):
    """An `Exchange` sends tokens to the ranks of their experts and the sums back, over a mesh of one dimension.

    Every method is a collective: all ranks call it alike.

    What it keeps of a micro-batch is in two tensors, `slots` and `arrivals`, so that checkpoints, pipelines and
    captured graphs see all of it.
    """

    name: str
    sums: torch.dtype | None = None  # in which partial sums travel: None for that of the rows
    beside = False  # whether tokens travel while other kernels run
    not_copied: frozenset[str] = frozenset()  # attributes that a copy gets anew

    def __init__(self, mesh: DeviceMesh, num_experts: int, top_k: int) -> None:
        """num_experts: of all ranks.  Raises FuseOpsError for a mesh that does not divide them."""
        check_mesh(mesh, num_experts)
        self.mesh, self.num_experts, self.top_k = mesh, num_experts, top_k
        self.world, self.rank = mesh.size(), mesh.get_local_rank()
        self.local = num_experts // self.world
        self._take_number()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self.not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_number()

    def _take_number(self) -> None:
        """By which compiled code finds it, for as long as the process lives."""
        self.number = len(_numbered)
        _numbered.append(self)

    @property
    def takes(self) -> str:
        """What that takes from those kernels, in words."""
        return ""

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def watch(self) -> None:
        """Have a rank that ends named by those that wait for it. A collective, the first time of a group."""
        lost.watch(self.group, aloud=self.mesh.device_type == "cuda")

    @abc.abstractmethod
    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        """x (T, D), experts (T, K) int32 with -1 for a copy that was dropped, weights (T, K)."""

    @abc.abstractmethod
    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """Partial sums y (C, D) -> (T, D), their sums where the tokens came from."""

    @abc.abstractmethod
    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """dx (C, D), dweights (C, K) or None -> those of (T, D) and (T, K)."""

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """`dispatch_bwd`, begun: what is called for its end. Here all is done before."""
        found = self.dispatch_bwd(dx, dweights, experts, slots, arrivals)
        return lambda: found

    @abc.abstractmethod
    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        """dy (T, D) -> (C, D), what every partial sum gets; tokens: C."""

    def begin_again(
        self, x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int
    ) -> Callable[[], Tensor]:
        """What arrived of x (T, D), sent once more: what is called for its C rows. Here nothing is done before."""
        return lambda: self.collect_bwd(x, slots, arrivals, tokens)

    @abc.abstractmethod
    def no_arrivals(self, x: Tensor) -> Tensor:
        """A tensor as `arrivals` is, without values."""

    def expected(self, x: Tensor) -> tuple[int, int]:
        """C and `rows` where ranks with as many tokens as x (T, D) send each other alike: for plans of one rank."""
        tokens = len(x)
        share = 1 - (1 - 1 / self.world) ** self.top_k
        return round(tokens * self.world * share), tokens * self.top_k

    def outside(self) -> dict[Any, int]:
        """As of `Op`: buffers that it has, or will have for what it was asked to expect."""
        return {}

    def in_a_dry_run(self, x: Tensor, rows: int) -> Tensor:
        """x, tokens here or at their experts, as the `rows` that they are at the other end."""
        tokens = max(len(x), rows)  # at their experts, where each is once a rank
        sent = tokens * (self.world - 1) // self.world
        return travel(x, rows, sent * x[:1].nbytes)

    def bound(self, offs: Tensor, rows: int) -> None:  # noqa: B027
        """Keep the ends of the experts here, in place, within the rows that `dispatch` said there are."""

    def members(self, experts: Tensor) -> Tensor:
        """(T, W) int32: the rank where it has some expert of the token, else -1."""
        every = torch.arange(self.world, dtype=torch.int32, device=experts.device)
        return torch.where(self.homes(experts)[:, :, None] == every, every, -1).amax(1)

    def homes(self, experts: Tensor) -> Tensor:
        """(T, K) int32: the rank of every copy, -1 of one that was dropped."""
        return experts.div(self.local, rounding_mode="floor").to(torch.int32)

    def there(self, experts: Tensor, owner: Tensor) -> Tensor:
        """experts (S, K) of tokens on their way to the ranks `owner` (S,) -> (S, K) int32, ids there or -1."""
        ids = experts.to(torch.int32) - owner[:, None].to(torch.int32) * self.local
        return torch.where((ids >= 0) & (ids < self.local) & (experts >= 0), ids, -1)

    def summed(self, rows: Tensor, slots: Tensor) -> Tensor:
        """The sum of what came back of each token, in the order of ranks."""
        return K.combine_fwd(rows, slots, K.one_group(len(rows), rows)[0])

    def own_weights(self, by_slot: Tensor, experts: Tensor, slots: Tensor) -> Tensor:
        """What came back beside the tokens (S, K), of every copy from the rank of its expert.   -> (T, K)"""
        homes = self.homes(experts)
        rows = slots.gather(1, homes.clamp(min=0).long()).long()
        rows = torch.where((homes >= 0) & (rows >= 0), rows, len(by_slot))
        padded = torch.cat([by_slot, by_slot.new_zeros(1, by_slot.shape[1])])
        return padded[rows, torch.arange(rows.shape[1], device=rows.device)]


def within_capacity(exchange: Exchange, experts: Tensor, factor: float) -> Tensor:
    """`experts` with -1 for every copy beyond the capacity of its expert, ceil(factor * T * K / E) over the tokens of
    all ranks, which come in the order of ranks: what one process with all of them drops.   (T, K)
    """
    count, top_k = exchange.num_experts, experts.shape[1]
    offs, _, pos, _ = K.route(experts, count)
    mine = torch.cat([offs.diff(prepend=offs.new_zeros(1)), offs.new_full((1,), len(experts))])
    of_all = torch_private.all_gather(mine, 0, exchange.group).view(exchange.world, -1)
    copies = of_all[:, -1].sum() * top_k
    room = (copies.double() * factor / count).ceil().long()
    before = of_all[: exchange.rank, :-1].sum(0)
    first = torch.cat([offs.new_zeros(1), offs[:-1]])
    at = experts.clamp(min=0).long()
    kept = (pos >= 0) & (pos - first[at] + before[at] < room)
    return torch.where(kept, experts, -1)
