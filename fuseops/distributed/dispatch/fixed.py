"""(b) `all_to_all_single` over any backend in equal splits: `room` slots of every pair of ranks, full or not.

No host sync, so over NCCL a step can be captured, across hosts too. More travels than the tokens that there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import kernels as K

from .all_to_all import AllToAll, Leaving
from .bounded import Bounded


class FixedCapacity(Bounded, AllToAll):
    """A `FixedCapacity` sends equal splits of a fixed capacity by all-to-all.

    slots: where a token lies among all slots that this rank sends, rank after rank.  arrivals: (W room,) int32, the
    token in every one of them, -1 in an empty one.
    """

    name = "all_to_all_single in equal splits of a fixed capacity (no host sync)"

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(self.expected(x)[0], dtype=torch.int32)

    def _leaving(self, x: Tensor, experts: Tensor) -> Leaving:
        self.agree(x)
        slots, _ = self.within_room(experts)
        ranks = torch.arange(self.world, dtype=torch.int32, device=x.device)
        total, token = self.world * self.room, torch.arange(len(x), device=x.device)
        slots = torch.where(slots >= 0, slots + ranks * self.room, -1)
        filled = torch.full((total + 1,), -1, dtype=torch.int32, device=x.device)
        at = torch.where(slots < 0, total, slots).long()  # what goes nowhere, to the end
        filled[at] = token[:, None].expand_as(at).to(torch.int32)
        filled = filled[:-1].clone()
        owner = ranks.repeat_interleave(self.room, output_size=total)
        return Leaving(slots, filled, filled, owner, self.rows)

    def _of_tokens(self, t: Tensor, tokens: Tensor, nothing: int) -> Tensor:
        return torch.cat([t, t.new_full((1, self.top_k), nothing)])[tokens.long()]  # -1 is the last

    def _rows(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """Every slot's token; in empty slots one that nobody reads."""
        if not len(x):
            return x.new_zeros(len(arrivals), x.shape[1])
        return K.gather_rows(x, arrivals.clamp(min=0).long(), K.one_group(len(arrivals), x)[0])
