"""The base of (a) and (b): rows travel by `all_to_all_single` while other kernels run."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops.distributed.pairs import BACKWARD, FORWARD, give_way

from .dispatcher import Dispatcher, ReceivedTokens


class OutgoingTokens(NamedTuple):
    """An `OutgoingTokens` describes the S rows that an all-to-all sends, in the order of target ranks."""

    slots: Tensor  # as of `ReceivedTokens`
    arrivals: Tensor
    tokens: Tensor  # (S,) the token of each row, -1 for an empty row
    owner: Tensor  # (S,) the target rank of each row
    rows: int  # as of `ReceivedTokens`


class AllToAll(Dispatcher):
    """An `AllToAll` moves rows by the kernels or threads of the backend: over NCCL streams wait, not the host."""

    overlaps_compute = True

    @property
    def kernel_resources(self) -> str:
        if self.mesh.device_type != "cuda":
            return ""
        most = os.environ.get("NCCL_MAX_CTAS", "not set")
        return f"the SMs of NCCL's channels (NCCL_MAX_CTAS: {most})"

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> ReceivedTokens:
        slots, arrivals, tokens, owner, rows = self._outgoing(x, experts)
        ids = self.local_ids(self._by_token(experts, tokens, -1), owner)
        words = self._by_token(weights, tokens, 0).view(torch.int32)
        head = wait_rows(*self._start(torch.cat([words, ids], 1), *self._splits(arrivals)))
        ids = head[:, -self.top_k :].contiguous()
        weights = head[:, : -self.top_k].flatten().view(weights.dtype).view_as(ids)
        x, ready = self._start_send(x, slots, arrivals)
        return ReceivedTokens(x, ids, weights, rows, slots, arrivals, ready)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        rows = wait_rows(*self._start_return(y, arrivals), side=FORWARD)
        summed = self.sum_returned(rows, slots)
        self.end_forward()
        return summed

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.begin_dispatch_bwd(dx, dweights, experts, slots, arrivals)()

    def begin_dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        sent = [self._start_return(t, arrivals) for t in (dx, dweights) if t is not None]

        def finish() -> tuple[Tensor, Tensor | None]:
            rows, *copies = [wait_rows(*each) for each in sent]
            weights = [self.weights_of_copies(t, experts, slots) for t in copies]
            summed = self.sum_returned(rows, slots)
            self.end_backward()
            return summed, weights[0] if weights else None

        return finish

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        return wait_rows(*self._start_send(dy, slots, arrivals), side=BACKWARD)

    def begin_resend(
        self, x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int
    ) -> Callable[[], Tensor]:
        sent = self._start_send(x, slots, arrivals)
        return lambda: wait_rows(*sent)

    @abc.abstractmethod
    def _outgoing(self, x: Tensor, experts: Tensor) -> OutgoingTokens:
        """The rows to send of x (T, D), by experts (T, K)."""

    @abc.abstractmethod
    def _rows_to_send(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        """The rows of x (T, D) in the order in which they are sent.   -> (S, D)"""

    def _by_token(self, t: Tensor, tokens: Tensor, nothing: int) -> Tensor:
        """t (T, K) gathered by `OutgoingTokens.tokens`; `nothing` in empty rows.   -> (S, K)"""
        return t[tokens]

    def _splits(self, arrivals: Tensor) -> tuple[list[int], ...]:
        """Input and output splits of the all-to-all; () for equal splits."""
        return ()

    def _start_send(
        self, x: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Callable[[], Any]]:
        """Start sending x (T, D) to the experts."""
        return self._start(self._rows_to_send(x, slots, arrivals), *self._splits(arrivals))

    def _start_return(self, y: Tensor, arrivals: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """Start sending y (C, D) back."""
        return self._start(y, *reversed(self._splits(arrivals)))

    def _start(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> tuple[Tensor, Callable[[], Any]]:
        """Start an all-to-all.   -> the received rows, and a function that waits for them"""
        count = len(rows) if received is None else sum(received)
        out = rows.new_empty(count, *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows.contiguous(), received, sent, group=self.group, async_op=True
        )
        return out, work.wait


def wait_rows(rows: Tensor, ready: Callable[[], Any], side: str = "") -> Tensor:
    """Wait for rows in flight.   side: of a pair, to which they belong; the other side runs in the meantime"""
    if side:
        give_way(side)
    ready()
    return rows
