"""(b) `all_to_all_single` over any backend in equal splits: `pair_capacity` slots between any two ranks, filled or not.

It has no host sync, so over NCCL a step can be captured, across hosts too. Empty slots travel too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import kernels as K

from .all_to_all import AllToAll, OutgoingTokens
from .bounded import Bounded


class FixedCapacity(Bounded, AllToAll):
    """A `FixedCapacity` dispatcher sends equal splits of a fixed capacity by all-to-all.

    slots: index of a token among all slots that this rank sends, rank after rank.  arrivals: (W pair_capacity,) int32,
    the token in each of these slots, -1 in an empty one.
    """

    name = "all_to_all_single in equal splits of a fixed capacity (no host sync)"

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(self.expected_sizes(x)[0], dtype=torch.int32)

    def _outgoing(self, x: Tensor, experts: Tensor) -> OutgoingTokens:
        self.begin_forward(x)
        slots, _ = self.assign_slots(experts)
        ranks = torch.arange(self.world, dtype=torch.int32, device=x.device)
        total, token = self.world * self.pair_capacity, torch.arange(len(x), device=x.device)
        slots = torch.where(slots >= 0, slots + ranks * self.pair_capacity, -1)
        filled = torch.full((total + 1,), -1, dtype=torch.int32, device=x.device)
        # tokens that are not sent go to an extra last slot
        at = torch.where(slots < 0, total, slots).long()
        filled[at] = token[:, None].expand_as(at).to(torch.int32)
        filled = filled[:-1].clone()
        owner = ranks.repeat_interleave(self.pair_capacity, output_size=total)
        return OutgoingTokens(slots, filled, filled, owner, self.rows)

    def _by_token(self, t: Tensor, tokens: Tensor, nothing: int) -> Tensor:
        return torch.cat([t, t.new_full((1, self.top_k), nothing)])[tokens.long()]  # -1 is the last

    def _rows_to_send(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """The token of each slot; empty slots get one that nobody reads."""
        if not len(x):
            return x.new_zeros(len(arrivals), x.shape[1])
        return K.gather_rows(x, arrivals.clamp(min=0).long(), K.one_group(len(arrivals), x)[0])
