"""(a) `all_to_all_single` over any backend, with splits that the host reads: one sync in the forward, none in the
backward. No token is dropped, and buffers hold exactly what travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import kernels as K

from .all_to_all import AllToAll, OutgoingTokens, wait_rows
from .dispatcher import check_row_sizes


class HostCounts(AllToAll):
    """A `HostCounts` dispatcher sends tokens by all-to-all, with counts that the host reads.

    arrivals: (2, W) int64 on the host, the numbers of tokens sent to each rank and received from it.
    """

    name = "all_to_all_single with counts read by the host (one sync a forward)"

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.world, dtype=torch.int64)

    def _outgoing(self, x: Tensor, experts: Tensor) -> OutgoingTokens:
        self.watch()
        ends, index, slots, _ = K.route(self.target_ranks(experts), self.world)
        arrivals, copies = self._counts(ends, experts, x.shape[1] * x.element_size())
        sent, ranks = int(arrivals[0].sum()), torch.arange(self.world, device=x.device)
        owner = ranks.repeat_interleave(arrivals[0].to(x.device), output_size=sent)
        return OutgoingTokens(slots, arrivals, index[:sent], owner, int(copies.sum()))

    def _counts(self, ends: Tensor, experts: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """`arrivals` (2, W), and the number of copies received from each rank (W,), both on the host.

        row: bytes of a row of x.  Raises FuseOpsError, on all ranks, if they send rows of different sizes.
        """
        copies = K.expert_counts(self.ranks_of_copies(experts), self.world)
        sent = ends.diff(prepend=ends.new_zeros(1))
        mine = torch.stack([sent, copies, torch.full_like(sent, row)], 1)  # (W, 3)
        sizes = torch.cat([mine, wait_rows(*self._start(mine))], 1).t().long().cpu()
        check_row_sizes(sizes[[2, 5]].flatten().tolist())
        return sizes[[0, 3]], sizes[4]

    def _rows_to_send(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        sent = int(arrivals[0].sum())
        return K.scatter_rows(x, slots, K.one_group(sent, x)[0], sent)

    def _splits(self, arrivals: Tensor) -> tuple[list[int], ...]:
        return tuple(arrivals.tolist())
