"""The base of dispatchers with buffers of a fixed size, which the ranks agree on once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import check_integers, check_numbers
from fuseops.errors import FuseOpsError

from .dispatcher import Dispatcher, check_row_sizes
from .overflow import watch_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_limits(capacity: float, tokens: int) -> None:
    """Raise FuseOpsError for an invalid `capacity` or `tokens`."""
    check_numbers("ExpertParallel", capacity=capacity)
    check_integers("ExpertParallel", 0, tokens=tokens)
    if capacity <= 0:
        raise FuseOpsError(
            f"ExpertParallel: capacity is {capacity}, which has room for nothing: 1.0 is even routing's."
        )


class Bounded(Dispatcher):
    """A `Bounded` dispatcher has no host syncs and no sizes that depend on the routing, so that a step can be captured
    as a CUDA graph, whose replays may route differently.

    capacity: rows of the grouped GEMMs, and slots between a pair of ranks (at most the tokens of one), as a multiple of
    what even routing takes. An overflow sets the flag, makes the sums NaN, and raises on all ranks: `OverflowWatch`.
    flag: (1,) int32 on the device, since the first forward.
    """

    not_copied = Dispatcher.not_copied | {"flag"}
    flag: Tensor

    def __init__(
        self,
        mesh: DeviceMesh,
        num_experts: int,
        top_k: int,
        *,
        capacity: float = 1.5,
        tokens: int = 0,
    ) -> None:
        """tokens: the most tokens of a rank; at least as many as any rank has in the first forward."""
        super().__init__(mesh, num_experts, top_k)
        check_limits(capacity, tokens)
        self.capacity, self.tokens = capacity, tokens
        self.agreed = False
        self.planned_bytes = 0  # `buffer_bytes` for the last `expected_sizes`

    @property
    def pair_capacity(self) -> int:
        """The most tokens that a rank may send to another."""
        return self._limits(self.tokens)[0]

    @property
    def rows(self) -> int:
        """The most copies that a rank may receive."""
        return self._limits(self.tokens)[1]

    def _limits(self, tokens: int) -> tuple[int, int]:
        """`pair_capacity` and `rows` for ranks with at most so many tokens."""
        share = 1 - (1 - 1 / self.world) ** self.top_k
        pair_capacity = min(tokens, _round_up_16(self.capacity * share * tokens))
        most = self.world * pair_capacity * min(self.top_k, self.local_experts)
        return pair_capacity, min(most, _round_up_16(self.capacity * tokens * self.top_k))

    def expected_sizes(self, x: Tensor) -> tuple[int, int]:
        pair_capacity, rows = self._limits(_round_up_16(max(len(x), self.tokens)))
        self.planned_bytes = self.buffer_bytes(x, pair_capacity)
        return self.world * pair_capacity, rows

    def buffer_bytes(self, x: Tensor, pair_capacity: int) -> int:
        """Bytes outside of torch's allocator for `pair_capacity` tokens like those of x, from and to every rank."""
        return 0

    def allocated_bytes(self) -> int:
        """Bytes outside of torch's allocator that are allocated now."""
        return 0

    def outside(self) -> dict[Any, int]:
        nbytes = max(self.allocated_bytes(), self.planned_bytes)
        return {(self.group.group_name, type(self)): nbytes} if nbytes else {}

    def clamp_offs(self, offs: Tensor, rows: int) -> None:
        K.bound_rows(offs, self.flag, rows)

    def assign_slots(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """`slots` (T, W), -1 where a token is not sent or does not fit, which sets the overflow flag; and the number of
        tokens sent to each rank (W,).
        """
        slots, counts = K.token_slots(experts, self.num_experts, self.world)
        self.flag |= (counts > self.pair_capacity).any().to(self.flag.dtype)
        return torch.where(slots < self.pair_capacity, slots, -1), counts.clamp(
            max=self.pair_capacity
        )

    def sum_returned(self, rows: Tensor, slots: Tensor) -> Tensor:
        """As `Dispatcher.sum_returned`; NaN after an overflow."""
        y = super().sum_returned(rows, slots)
        return y.masked_fill_(self.flag != 0, torch.nan)

    def room(self) -> str:
        """What there is room for, for errors."""
        return (
            f"{self.path or 'a layer'} has room for {self.pair_capacity} tokens from a rank to a rank and {self.rows} "
            f"copies (capacity={self.capacity:g}, at most {self.tokens} tokens a rank)"
        )

    def begin_forward(self, x: Tensor) -> None:
        """Begin a forward over x.  Raises FuseOpsError for an overflow that has become known, and as
        `agree_on_tokens`.
        """
        self.agree_on_tokens(x)
        watch_of(self.group).begin_forward(self)

    def end_forward(self) -> None:
        watch_of(self.group).end_forward(self)

    def end_backward(self) -> None:
        watch_of(self.group).end_backward(self)

    def agree_on_tokens(self, x: Tensor) -> None:
        """Agree on the most tokens of a rank, in the first forward.  Raises FuseOpsError for more in a later one, and
        for rows of different sizes.
        """
        if not (self.agreed and hasattr(self, "flag")):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise FuseOpsError(
                    "ExpertDispatch: the ranks have not agreed on a size yet. Run one step before the capture."
                )
            with torch.inference_mode(False):  # later forwards may be of training
                self.flag = torch.zeros(1, dtype=torch.int32, device=x.device)
        if not self.agreed:
            self.watch()
            row = x.shape[1] * x.element_size()
            most = torch.tensor([max(len(x), 1, self.tokens), row, -row], device=x.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            tokens, *rows = most.tolist()
            check_row_sizes([rows[0], -rows[1]])
            self.tokens, self.agreed = _round_up_16(tokens), True
        if len(x) > self.tokens:
            raise FuseOpsError(
                f"ExpertDispatch: {len(x)} tokens, and the ranks agreed on {self.tokens} at most in their first "
                "forward: run the longest batch first, or set `tokens=` of ExpertParallel."
            )


def _round_up_16(count: float) -> int:
    return 16 * math.ceil(count / 16)
