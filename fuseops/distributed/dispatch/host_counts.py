"""(a) `all_to_all_single` over any backend, with splits that the host reads: one sync in the forward, none in the
backward. No token is dropped, and buffers hold exactly what travels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .all_to_all import AllToAll, OutgoingTokens, wait_rows
from .dispatcher import UNKNOWN, check_row_sizes


class HostCounts(AllToAll):
    """A `HostCounts` dispatcher sends tokens by all-to-all, with counts that the host reads.

    arrivals: (3, W) int64 on the host, the numbers of tokens sent to each rank and received from it, and how many
    gradients the backward of that rank sends back (`Dispatcher.gradients`).
    """

    name = "all_to_all_single with counts read by the host (one sync a forward)"

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(3, self.world, dtype=torch.int64)

    def _outgoing(self, x: Tensor, experts: Tensor) -> OutgoingTokens:
        self.watch()
        ends, index, slots, _ = K.route(self.target_ranks(experts), self.world)
        arrivals, copies = self._counts(ends, experts, x.shape[1] * x.element_size())
        sent, ranks = int(arrivals[0].sum()), torch.arange(self.world, device=x.device)
        owner = ranks.repeat_interleave(arrivals[0].to(x.device), output_size=sent)
        return OutgoingTokens(slots, arrivals, index[:sent], owner, int(copies.sum()))

    def _counts(self, ends: Tensor, experts: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """`arrivals` (3, W), and the number of copies received from each rank (W,), both on the host.

        row: bytes of a row of x.  Raises FuseOpsError, on all ranks, if they send rows of different sizes.
        """
        copies = K.expert_counts(self.ranks_of_copies(experts), self.world)
        sent = ends.diff(prepend=ends.new_zeros(1))
        own = (torch.full_like(sent, number) for number in (row, self.gradients))
        mine = torch.stack([sent, copies, *own], 1)  # (W, 4)
        sizes = torch.cat([mine, wait_rows(*self._start(mine))], 1).t().long().cpu()
        check_row_sizes(sizes[[2, 6]].flatten().tolist())
        return sizes[[0, 4, 7]], sizes[5]

    def _rows_to_send(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        sent = int(arrivals[0].sum())
        return K.scatter_rows(x, slots, K.one_group(sent, x)[0], sent)

    def _splits(self, arrivals: Tensor) -> tuple[list[int], ...]:
        return tuple(arrivals[:2].tolist())

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        self._check_gradients(arrivals[2].tolist())
        return super().begin_dispatch_bwd(dx, dweights, experts, slots, arrivals)

    def _check_gradients(self, gradients: list[int]) -> None:
        """Raise FuseOpsError if a rank sends back other gradients than this one, which would wait for it."""
        mine = gradients[self.rank]
        for rank, theirs in enumerate(gradients):
            if theirs != mine and UNKNOWN not in (mine, theirs):
                what = ("nothing", "gradients of x", "gradients of x and of the router's weights")
                raise FuseOpsError(
                    f"ExpertDispatch: the backward of {self.path or 'a layer'} sends back {what[mine]} on this rank, "
                    f"and {what[theirs]} on rank {dist.get_global_rank(self.group, rank)}: one would wait for the "
                    "other. All ranks run the same backward: x requires a gradient, and the router is trained, on all "
                    "of them or on none."
                )
