"""What ways of a fixed size share: room for as many tokens as `capacity` says, agreed on once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.ops.checks import check_integers, check_numbers

from .exchange import Exchange
from .overflow import flag_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_limits(capacity: float, tokens: int) -> None:
    """Raise FuseOpsError for limits that leave room for nothing."""
    check_numbers("ExpertParallel", capacity=capacity)
    check_integers("ExpertParallel", 0, tokens=tokens)
    if capacity <= 0:
        raise FuseOpsError(
            f"ExpertParallel: capacity is {capacity}, which has room for nothing: 1.0 is even routing's."
        )


class Bounded(Exchange):
    """A `Bounded` is an expert-parallel exchange without host syncs or sizes that depend on the routing, so that a step
    can be captured; a replay routes anew.

    capacity: rows of the grouped GEMMs, and slots of a pair of ranks where they are fewer than the tokens of one, are
    that many times what even routing takes. What does not fit sets the group's flag and makes the sums NaN.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        num_experts: int,
        top_k: int,
        *,
        capacity: float = 1.5,
        tokens: int = 0,
    ) -> None:
        """tokens: of a rank, at most; what the first forward of all ranks has, where that is more."""
        super().__init__(mesh, num_experts, top_k)
        check_limits(capacity, tokens)
        self.capacity, self.tokens = capacity, tokens
        self.agreed = False
        self.foreseen = 0  # of `buffers`, by a plan

    @property
    def room(self) -> int:
        """Tokens that a rank may send to another."""
        return self._limits(self.tokens)[0]

    @property
    def rows(self) -> int:
        """Copies that a rank has room for."""
        return self._limits(self.tokens)[1]

    def _limits(self, tokens: int) -> tuple[int, int]:
        """`room` and `rows` for as many tokens of a rank at most."""
        share = 1 - (1 - 1 / self.world) ** self.top_k
        room = min(tokens, _sixteens(self.capacity * share * tokens))
        most = self.world * room * min(self.top_k, self.local)
        return room, min(most, _sixteens(self.capacity * tokens * self.top_k))

    def expected(self, x: Tensor) -> tuple[int, int]:
        room, rows = self._limits(_sixteens(max(len(x), self.tokens)))
        self.foreseen = self.buffers(x, room)
        return self.world * room, rows

    def buffers(self, x: Tensor, room: int) -> int:
        """Bytes outside of torch's allocator that `room` tokens like those of x take, from and to every rank."""
        return 0

    def held(self) -> int:
        """Bytes outside of torch's allocator that are there."""
        return 0

    def outside(self) -> dict[Any, int]:
        nbytes = max(self.held(), self.foreseen)
        return {(self.group.group_name, type(self)): nbytes} if nbytes else {}

    def bound(self, offs: Tensor, rows: int) -> None:
        K.bound_rows(offs, flag_of(self.group, offs.device), rows)

    def within_room(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Where a token lies among those for a rank (T, W), -1 where it does not go or finds no room, which the flag
        notes; and how many there are for each rank (W,).
        """
        slots, counts = K.token_slots(experts, self.num_experts, self.world)
        flag = flag_of(self.group, experts.device)
        flag |= (counts > self.room).any().to(flag.dtype)
        return torch.where(slots < self.room, slots, -1), counts.clamp(max=self.room)

    def summed(self, rows: Tensor, slots: Tensor) -> Tensor:
        """As of any exchange; NaN where something had no room."""
        y = super().summed(rows, slots)
        return y.masked_fill_(flag_of(self.group, rows.device) != 0, torch.nan)

    def agree(self, x: Tensor) -> None:
        """On the most tokens of a rank, as the first forward has them.  Raises FuseOpsError for more, later."""
        if not self.agreed:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise FuseOpsError(
                    "ExpertDispatch: the ranks have not agreed on a size yet. Run one step before the capture."
                )
            self.watch()
            tokens = torch.tensor([max(len(x), 1, self.tokens)], device=x.device)
            dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self.group)
            self.tokens, self.agreed = _sixteens(int(tokens)), True
        if len(x) > self.tokens:
            raise FuseOpsError(
                f"ExpertDispatch: {len(x)} tokens, and the ranks agreed on {self.tokens} at most in their first "
                "forward: run the longest batch first, or set `tokens=` of ExpertParallel."
            )


def _sixteens(count: float) -> int:
    return 16 * math.ceil(count / 16)
