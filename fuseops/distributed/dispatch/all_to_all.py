"""What (a) and (b) share: rows between all ranks by `all_to_all_single`, which runs beside other kernels."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fuseops import kernels as K
from fuseops.distributed.pairs import BACKWARD, FORWARD, give_way

from .exchange import Exchange, all_of


class AllToAll(Exchange):
    """The backend's own kernels or threads move the rows: over NCCL the stream waits for them, not the host."""

    beside = True

    @property
    def takes(self) -> str:
        if self.mesh.device_type != "cuda":
            return ""
        most = os.environ.get("NCCL_MAX_CTAS", "not set")
        return f"the SMs of NCCL's channels (NCCL_MAX_CTAS: {most})"

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self._summed(_arrived(FORWARD, *self._begun(y, *self._home(arrivals))), slots)

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.begin_dispatch_bwd(dx, dweights, experts, slots, arrivals)()

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        sizes = self._home(arrivals)
        sent = [self._begun(t, *sizes) for t in (dx, dweights) if t is not None]

        def end() -> tuple[Tensor, Tensor | None]:
            for _, ready in sent:
                ready()
            (rows, _), *copies = sent
            weights = [self.own_weights(t, experts, slots) for t, _ in copies]
            return self._summed(rows, slots), weights[0] if weights else None

        return end

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        return _arrived(BACKWARD, *self._begun(*self._leaving(dy, slots, arrivals)))

    def begin_again(
        self, x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int
    ) -> Callable[[], Tensor]:
        rows, ready = self._begun(*self._leaving(x, slots, arrivals))

        def end() -> Tensor:
            ready()
            return rows

        return end

    @abc.abstractmethod
    def _leaving(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> tuple[Any, ...]:
        """Rows of x (T, D) as they leave, and how many go to each rank and come from it; of equal parts, rows alone."""

    def _home(self, arrivals: Tensor) -> tuple[list[int], ...]:
        """Rows that go to each rank and that come from it, on their way back; none for equal parts."""
        return ()

    def _begun(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> tuple[Tensor, Callable[[], Any]]:
        """What comes for the rows, and what is called before it is read."""
        out = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), received, sent, group=self.group, async_op=True
        )
        return out, work.wait

    def _swapped(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """What comes for the rows, there: for few bytes, until which nobody else goes on."""
        out, ready = self._begun(rows, sent, received)
        ready()
        return out

    def _summed(self, rows: Tensor, slots: Tensor) -> Tensor:
        """The sum of what came back of each token, in the order of ranks."""
        return K.combine_fwd(rows, slots, all_of(len(rows), rows))


def _arrived(side: str, rows: Tensor, ready: Callable[[], Any]) -> Tensor:
    """Rows that are on their way, there; the other of a pair goes on until then."""
    give_way(side)
    ready()
    return rows
