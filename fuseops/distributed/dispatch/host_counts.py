"""(a) `all_to_all_single` over any backend, with splits that the host reads: one sync in the forward, none in the
backward. Nothing is dropped, and no buffer is larger than what travels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import kernels as K

from .exchange import Arrived, Exchange, all_of


class HostCounts(Exchange):
    """arrivals: (2, W) int64 on the host, the tokens that go to each rank and that come from it."""

    name = "all_to_all_single with counts read by the host (one sync a forward)"

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        ends, index, slots, _ = K.route(self.members(experts), self.world)
        tokens, copies = self._sizes(ends, experts)
        arrivals = tokens.clone()
        sent, rows = int(tokens[0].sum()), int(copies.sum())
        index = index[:sent]
        ranks = torch.arange(self.world, device=x.device)
        owner = ranks.repeat_interleave(tokens[0].to(x.device), output_size=sent)
        ids = self.there(experts[index], owner)
        head = torch.cat([weights[index].view(torch.int32), ids], 1)
        x = self._there(K.scatter_rows(x, slots, ends, sent), arrivals)
        head = self._there(head, arrivals)
        ids = head[:, -self.top_k :].contiguous()
        weights = head[:, : -self.top_k].flatten().view(weights.dtype).view_as(ids)
        return Arrived(x, ids, weights, rows, slots, arrivals)

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.world, dtype=torch.int64)

    def _sizes(self, ends: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """On the host: tokens (2, W) that go to each rank and come from it, copies (W,) that come."""
        copies = K.expert_counts(self.homes(experts), self.world)
        mine = torch.stack([ends.diff(prepend=ends.new_zeros(1)), copies], 1)  # (W, 2)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        sizes = torch.cat([mine, theirs], 1).t().long().cpu()
        return sizes[[0, 2]], sizes[3]

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self._summed(self._home(y, arrivals), slots)

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        back = self._summed(self._home(dx, arrivals), slots)
        if dweights is None:
            return back, None
        return back, self.own_weights(self._home(dweights, arrivals), experts, slots)

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        sent = int(arrivals[0].sum())
        return self._there(K.scatter_rows(dy, slots, all_of(sent, dy), sent), arrivals)

    def _there(self, rows: Tensor, arrivals: Tensor) -> Tensor:
        return self._exchanged(rows, *arrivals.tolist())

    def _home(self, rows: Tensor, arrivals: Tensor) -> Tensor:
        return self._exchanged(rows, *reversed(arrivals.tolist()))

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out

    def _summed(self, rows: Tensor, slots: Tensor) -> Tensor:
        """The sum of what came back of each token, in the order of ranks."""
        return K.combine_fwd(rows, slots, all_of(len(rows), rows))
