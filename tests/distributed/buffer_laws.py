"""A dispatcher of one's own: a buffer with the interface of DeepEP's (normal mode) under a `Dispatcher`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from expert_laws import D, equal_to_one_process, tokens
from torch import Tensor

from fuseops.distributed import ExpertParallel
from fuseops.distributed.dispatch import Dispatcher, ReceivedTokens

Handle = tuple[Tensor, Tensor, Tensor]


class Buffer:
    """Stands for `deep_ep.Buffer`: its methods, what they take and give, and an opaque handle of tensors."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        home = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.world), -1)
        every = torch.arange(self.world)
        goes = (home[:, :, None] == every).any(1)
        chosen = topk_idx[topk_idx >= 0]
        return goes.sum(0), None, torch.bincount(chosen, minlength=num_experts), goes, None

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            goes = handle[2].bool()
            return (
                self._swapped([x[goes[:, r]] for r in range(self.world)]),
                None,
                None,
                None,
                handle,
                None,
            )
        assert is_token_in_rank is not None and topk_idx is not None and topk_weights is not None
        assert num_tokens_per_expert is not None and num_tokens_per_rank is not None
        assert topk_idx.dtype is torch.int64 and is_token_in_rank.dtype is torch.bool
        local = len(num_tokens_per_expert) // self.world
        sent: list[list[Tensor]] = [[], [], []]
        for r in range(self.world):
            mine = is_token_in_rank[:, r]
            ids = topk_idx[mine] - r * local
            here = (ids >= 0) & (ids < local) & (topk_idx[mine] >= 0)
            sent[0].append(x[mine])
            sent[1].append(torch.where(here, ids, -1))
            sent[2].append(torch.where(here, topk_weights[mine], 0))
        counts = self._swapped([n.view(1) for n in num_tokens_per_rank])
        got = [self._swapped(rows) for rows in sent]
        handle = (counts, num_tokens_per_rank, is_token_in_rank.to(torch.int32))
        per_expert = [int((got[1] == e).sum()) for e in range(local)]
        return *got, per_expert, handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        goes = handle[2].bool()

        def home(rows: Tensor) -> Tensor:
            back = self._swapped(list(rows.split(handle[0].tolist())))
            total = rows.new_zeros(len(goes), rows.shape[1])
            for r, part in enumerate(back.split(handle[1].tolist())):
                total[goes[:, r]] += part
            return total

        return home(x), None if topk_weights is None else home(topk_weights), None

    def _swapped(self, rows: list[Tensor]) -> Tensor:
        """One tensor for every rank: those of all ranks for this one."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, [t.detach() for t in rows], group=self.group)
        return torch.cat([theirs[self.rank] for theirs in every])


class Buffered(Dispatcher):
    """Over a `Buffer`.  slots: which ranks a token goes to.  arrivals: the rest of the handle, end to end."""

    name = "a buffer of another library"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffer = Buffer(self.group)

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> ReceivedTokens:
        chosen = experts.long()
        per_rank, _, per_expert, goes, _ = self.buffer.get_dispatch_layout(chosen, self.num_experts)
        x, ids, weights, counts, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            topk_idx=chosen,
            topk_weights=weights,
        )
        return ReceivedTokens(x, ids.int(), weights, sum(counts), handle[2], torch.cat(handle[:2]))

    def _handle(self, slots: Tensor, arrivals: Tensor) -> Handle:
        counts, per_rank = arrivals.split(self.world)
        return counts, per_rank, slots

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self.buffer.combine(y, self._handle(slots, arrivals))[0]

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        handle = self._handle(slots, arrivals)
        return self.buffer.combine(dx, handle, topk_weights=dweights)[:2]

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        return self.buffer.dispatch(dy, handle=self._handle(slots, arrivals))[0]

    def no_arrivals(self, x: Tensor) -> Tensor:
        return torch.empty(2 * self.world, dtype=torch.int64)


def law_a_buffer_of_another_library_fits() -> None:
    style = ExpertParallel(dispatcher=Buffered, average=False)
    for counts in (tokens(9, 4), tokens(0, 7)):
        moe = equal_to_one_process(counts, style=style, shared_experts=1)
        assert Buffered.name in str(moe.explain(torch.randn(3, D, dtype=torch.float64)))
