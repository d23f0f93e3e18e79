"""(a) and (b) send rows between all ranks by `all_to_all_single`, which runs beside other kernels."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops.distributed.pairs import BACKWARD, FORWARD, give_way

from .exchange import Arrived, Exchange


class Leaving(NamedTuple):
    """A `Leaving` holds the tokens that an all-to-all sends to other ranks, in the order of the ranks."""

    slots: Tensor  # as of `Arrived`
    arrivals: Tensor
    tokens: Tensor  # (S,) which token every row is; -1 for one that is none
    owner: Tensor  # (S,) where it goes
    rows: int  # as of `Arrived`


class AllToAll(Exchange):
    """In an `AllToAll` the backend's own kernels or threads move the rows: over NCCL the stream waits, not the host."""

    beside = True

    @property
    def takes(self) -> str:
        if self.mesh.device_type != "cuda":
            return ""
        most = os.environ.get("NCCL_MAX_CTAS", "not set")
        return f"the SMs of NCCL's channels (NCCL_MAX_CTAS: {most})"

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        slots, arrivals, tokens, owner, rows = self._leaving(x, experts)
        ids = self.there(self._of_tokens(experts, tokens, -1), owner)
        beside = self._of_tokens(weights, tokens, 0).view(torch.int32)
        head = arrived(*self._begun(torch.cat([beside, ids], 1), *self._sizes(arrivals)))
        ids = head[:, -self.top_k :].contiguous()
        weights = head[:, : -self.top_k].flatten().view(weights.dtype).view_as(ids)
        x, ready = self._sent(x, slots, arrivals)
        return Arrived(x, ids, weights, rows, slots, arrivals, ready)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self.summed(arrived(*self._returned(y, arrivals), side=FORWARD), slots)

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.begin_dispatch_bwd(dx, dweights, experts, slots, arrivals)()

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        sent = [self._returned(t, arrivals) for t in (dx, dweights) if t is not None]

        def end() -> tuple[Tensor, Tensor | None]:
            rows, *copies = [arrived(*each) for each in sent]
            weights = [self.own_weights(t, experts, slots) for t in copies]
            return self.summed(rows, slots), weights[0] if weights else None

        return end

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        return arrived(*self._sent(dy, slots, arrivals), side=BACKWARD)

    def begin_again(
        self, x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int
    ) -> Callable[[], Tensor]:
        sent = self._sent(x, slots, arrivals)
        return lambda: arrived(*sent)

    @abc.abstractmethod
    def _leaving(self, x: Tensor, experts: Tensor) -> Leaving:
        """Which tokens of x (T, D) go where, by experts (T, K)."""

    @abc.abstractmethod
    def _rows(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """Rows of x (T, D) as they leave.   -> (S, D)"""

    def _of_tokens(self, t: Tensor, tokens: Tensor, nothing: int) -> Tensor:
        """t (T, K) of `Leaving.tokens`, `nothing` where there is none.   -> (S, K)"""
        return t[tokens]

    def _sizes(self, arrivals: Tensor) -> tuple[list[int], ...]:
        """Rows that go to each rank and that come from it; none for equal parts."""
        return ()

    def _sent(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """x on its way to the experts."""
        return self._begun(self._rows(x, slots, arrivals), *self._sizes(arrivals))

    def _returned(self, y: Tensor, arrivals: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """y on its way home."""
        return self._begun(y, *reversed(self._sizes(arrivals)))

    def _begun(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> tuple[Tensor, Callable[[], Any]]:
        """What comes for the rows, and what is called before it is read."""
        count = len(rows) if received is None else sum(received)
        out = rows.new_empty(count, *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), received, sent, group=self.group, async_op=True
        )
        return out, work.wait


def arrived(rows: Tensor, ready: Callable[[], Any], side: str = "") -> Tensor:
    """Rows that were on their way.   side: of a pair, whose they are: the other goes on until then"""
    if side:
        give_way(side)
    ready()
    return rows
