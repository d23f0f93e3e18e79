"""(a) `all_to_all_single` over any backend, with splits that the host reads: one sync in the forward, none in the
backward. Nothing is dropped, and no buffer is larger than what travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import kernels as K

from .all_to_all import AllToAll, Leaving, arrived


class HostCounts(AllToAll):
    """A `HostCounts` sends tokens by all-to-all, by counts that the host reads.

    arrivals: (2, W) int64 on the host, the tokens that go to each rank and that come from it.
    """

    name = "all_to_all_single with counts read by the host (one sync a forward)"

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.world, dtype=torch.int64)

    def _leaving(self, x: Tensor, experts: Tensor) -> Leaving:
        self.watch()
        ends, index, slots, _ = K.route(self.members(experts), self.world)
        arrivals, copies = self._counts(ends, experts)
        sent, ranks = int(arrivals[0].sum()), torch.arange(self.world, device=x.device)
        owner = ranks.repeat_interleave(arrivals[0].to(x.device), output_size=sent)
        return Leaving(slots, arrivals, index[:sent], owner, int(copies.sum()))

    def _counts(self, ends: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """On the host: tokens (2, W) that go to each rank and come from it, copies (W,) that come."""
        copies = K.expert_counts(self.homes(experts), self.world)
        mine = torch.stack([ends.diff(prepend=ends.new_zeros(1)), copies], 1)  # (W, 2)
        sizes = torch.cat([mine, arrived(*self._begun(mine))], 1).t().long().cpu()
        return sizes[[0, 2]], sizes[3]

    def _rows(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        sent = int(arrivals[0].sum())
        return K.scatter_rows(x, slots, K.one_group(sent, x)[0], sent)

    def _sizes(self, arrivals: Tensor) -> tuple[list[int], ...]:
        return tuple(arrivals.tolist())
