"""Repeated calls of a segment replay a transcript of an earlier call, instead of running its Python.

Forward and backward are each recorded at the third call of a kind (or a later one, once launchers are replayed), after
both have passed the contract check. A transcript is valid while no op is written to, no launch setting changes and the
operands match (`kernels.transcript`). Nothing is replayed while somebody observes the calls of ops or their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from fuseops.kernels.launch import thread
from fuseops.kernels.registry import may_replay
from fuseops.kernels.replay import active_replays
from fuseops.kernels.transcript import Repeat, Transcriber, transcribable, transcribing
from fuseops.ops import scopes
from fuseops.ops.tiles import shares_only_tables
from fuseops.plain import PLAIN_OR_NONE
from fuseops.plan.segment import Segment, SlotMap
from fuseops.recipes.numerics import QuantizationStats

from .checks import running_step
from .saving import pack, unpack
from .steps import CallContext, write_backward, write_forward

# of a kind, before one is recorded; the call that checks the contract is not counted
WARMUP_CALLS = 1
MAX_TRIES = 8  # of a kind
MAX_TRANSCRIPTS = 4  # of a kind: strides may differ
MAX_KINDS = 64  # of a segment


class KindTranscripts:
    """A `KindTranscripts` holds the transcripts of calls of one kind: a shape of x, or what a backward is given.

    transcripts     functions, each with the results of its call that are no tensors
    """

    def __init__(self) -> None:
        self.transcripts: list[tuple[Repeat, Any]] = []
        self.calls = self.tries = 0

    def should_record(self, operands: Sequence[Tensor]) -> bool:
        """Whether to record this call, which no transcript matches."""
        self.calls += 1
        if (
            self.calls <= WARMUP_CALLS
            or self.tries >= MAX_TRIES
            or len(self.transcripts) >= MAX_TRANSCRIPTS
        ):
            return False
        self.tries += 1
        return transcribable(operands)

    def add(self, seen: Transcriber, out: Any, beside: Any) -> None:
        """Add the transcript of a recorded call, where it has one.   out: what the call returned"""
        new = seen.generate(out)
        if new is not None:
            self.transcripts.append((new, beside))
        elif seen.never:
            self.tries = MAX_TRIES


class SegmentTranscripts:
    """A `SegmentTranscripts` holds the transcripts of one segment, by the kind of call."""

    def __init__(self) -> None:
        self.replays = active_replays.current  # another object once a launch setting has changed
        self.kinds: dict[Any, KindTranscripts] = {}

    def add(self, kind: Any) -> KindTranscripts:
        """Add a kind of call, without transcripts yet."""
        if len(self.kinds) >= MAX_KINDS:
            self.kinds.clear()
        found = self.kinds[kind] = KindTranscripts()
        return found


def transcripts_of(seg: Segment, context: CallContext, unseen: bool) -> SegmentTranscripts | None:
    """The transcripts of a segment; new, empty ones after `Segment.forget`, or where a launch setting changed.

    None where the call may not be replayed: somebody observes it, it writes to the caller's buffers, or its ops share
    more than tile tables.   unseen: nobody observes the calls of kernels
    """
    if not (unseen and seg.repeatable) or context.contract is not None or context.out is not None:
        return None
    if (
        QuantizationStats.active
        or scopes.thread.active.debug is not None
        or (context.scratch and not shares_only_tables(context.scratch))
    ):
        return None
    found: SegmentTranscripts | None = seg.repeats
    if found is None or found.replays is not active_replays.current:
        found = seg.repeats = SegmentTranscripts()
    return found


def forward(
    seg: Segment, x: Any, t: list[Any], context: CallContext
) -> tuple[Any, Sequence[Tensor], Sequence[Any], Any]:
    """Run, or replay, the forward of a segment.

    -> y, the tensors to save for the backward, where each kept field is among them, dtypes of x
    """
    run_steps = seg.fwd or write_forward(seg)
    unseen = may_replay()
    before, thread.replay_mode = thread.replay_mode, seg.quiet and unseen
    try:
        transcripts = transcripts_of(seg, context, unseen)
        if transcripts is not None:
            operands = [x, *[tensor for tensor in t if tensor is not None]]
            known = transcripts.kinds.get(x.shape) or transcripts.add(x.shape)
            try:
                for transcript, (rows, x_dtypes) in known.transcripts:
                    out = transcript(operands, context.scratch)
                    if out is not None:
                        y, flat, exported = out
                        t += [None] * (seg.size - len(t))
                        for position, side in zip(seg.export_positions, exported, strict=True):
                            t[position] = side
                        return y, flat, rows, x_dtypes
            except Exception:
                # the steps run once this handler has freed its tensors; their error names the op
                transcripts = None
        if transcripts is None or not known.should_record(operands):
            y, kept, x_dtypes = run_steps(x, t, context)
            return y, *pack(seg, kept), x_dtypes
        with transcribing(operands, context.scratch) as seen:
            y, kept, x_dtypes = run_steps(x, t, context)
        flat, rows = pack(seg, kept)
        exported = tuple([t[position] for position in seg.export_positions])
        if type(rows) is SlotMap and PLAIN_OR_NONE.issuperset(map(type, (y, *exported))):
            known.add(seen, (y, (*flat,), exported), (rows, x_dtypes))
        return y, flat, rows, x_dtypes
    finally:
        thread.replay_mode = before


GradsIn = tuple[Any, Any, Any, CallContext]
"""What a backward is given besides saved tensors: dy, dsides, dtypes of x, the context."""


def backward(seg: Segment, rows: Sequence[Any], saved: list[Tensor], given: GradsIn) -> Any:
    """Run, or replay, the backward of a segment.

    rows: where the kept fields are among the `saved` tensors.
    saved: what autograd saved; the list is emptied, so that tensors are freed early.
    """
    run_steps, (dy, dsides, x_dtypes, context) = seg.bwd or write_backward(seg), given
    unseen = may_replay()
    before, thread.replay_mode = thread.replay_mode, seg.quiet and unseen
    try:
        bypasses = seg.bypasses_autograd  # its gradients are written to where others look
        transcripts = None if bypasses else transcripts_of(seg, context, unseen)
        if transcripts is None or type(rows) is not SlotMap or dy is None:
            return run_steps(_unpack_and_clear(rows, saved), *given)
        grads_in = [d for d in (dy, *dsides) if d is not None]
        kind = dy.shape, tuple([d is None for d in dsides]), id(rows), x_dtypes
        known = transcripts.kinds.get(kind) or transcripts.add(kind)
        saved[:0] = grads_in
        for transcript, _ in known.transcripts:
            out = transcript(saved, context.scratch)
            if out is not None:
                return out
        record = known.should_record(saved)
        recorder = transcribing(saved, context.scratch, running_step) if record else nullcontext()
        with recorder as seen:
            del saved[: len(grads_in)]
            grads = run_steps(_unpack_and_clear(rows, saved), *given)
        if seen is not None:
            known.add(seen, grads, rows)  # `kind` has the id of rows: keep them alive
        return grads
    finally:
        thread.replay_mode = before


def _unpack_and_clear(rows: Sequence[Any], saved: list[Tensor]) -> list[Any]:
    kept = unpack(rows, saved)
    saved.clear()
    return kept
