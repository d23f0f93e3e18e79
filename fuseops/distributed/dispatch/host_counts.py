"""(a) `all_to_all_single` over any backend, with splits that the host reads: one sync in the forward, none in the
backward. Nothing is dropped, and no buffer is larger than what travels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K

from .all_to_all import AllToAll
from .exchange import Arrived, all_of


class HostCounts(AllToAll):
    """arrivals: (2, W) int64 on the host, the tokens that go to each rank and that come from it."""

    name = "all_to_all_single with counts read by the host (one sync a forward)"

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        self.watch()
        ends, index, slots, _ = K.route(self.members(experts), self.world)
        tokens, copies = self._sizes(ends, experts)
        arrivals = tokens.clone()
        sent, rows = int(tokens[0].sum()), int(copies.sum())
        index = index[:sent]
        ranks = torch.arange(self.world, device=x.device)
        owner = ranks.repeat_interleave(tokens[0].to(x.device), output_size=sent)
        ids = self.there(experts[index], owner)
        head = torch.cat([weights[index].view(torch.int32), ids], 1)
        head = self._swapped(head, *arrivals.tolist())
        x, ready = self._begun(K.scatter_rows(x, slots, ends, sent), *arrivals.tolist())
        ids = head[:, -self.top_k :].contiguous()
        weights = head[:, : -self.top_k].flatten().view(weights.dtype).view_as(ids)
        return Arrived(x, ids, weights, rows, slots, arrivals, ready)

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.world, dtype=torch.int64)

    def _sizes(self, ends: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """On the host: tokens (2, W) that go to each rank and come from it, copies (W,) that come."""
        copies = K.expert_counts(self.homes(experts), self.world)
        mine = torch.stack([ends.diff(prepend=ends.new_zeros(1)), copies], 1)  # (W, 2)
        sizes = torch.cat([mine, self._swapped(mine)], 1).t().long().cpu()
        return sizes[[0, 2]], sizes[3]

    def _leaving(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> tuple[Any, ...]:
        sent = int(arrivals[0].sum())
        return K.scatter_rows(x, slots, all_of(sent, x), sent), *arrivals.tolist()

    def _home(self, arrivals: Tensor) -> tuple[list[int], ...]:
        came, sent = arrivals.flip(0).tolist()
        return came, sent
