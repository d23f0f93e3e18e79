"""Policies: which saved tensors a scheduler moves, by name, size and share. Pure."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import NoneType
from typing import NamedTuple

import torch

from fuseops.arguments import check_integers, instance_of, shown
from fuseops.errors import FuseOpsError
from fuseops.globs import as_globs, matches
from fuseops.ops.names import SavedName

DEFAULT_MIN_BYTES = 1 << 20  # smaller copies run far below the speed of the link


class Candidate(NamedTuple):
    """A candidate is a saved tensor that a policy decides about.

    nbytes  of its storage
    also    its other names
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, t: torch.Tensor, named: SavedName) -> "Candidate":
        own, *also = named.names
        nbytes = t.untyped_storage().nbytes()
        return cls(own, named.op, tuple(t.shape), t.dtype, nbytes, tuple(also))

    def matches(self, glob: str) -> bool:
        """Whether the glob matches one of the names.  Raises FuseOpsError for what is no text."""
        instance_of(glob, str, "Candidate.matches(glob)", "a glob, such as 'blocks.*.x'")
        return any(matches(glob, name) for name in (self.name, *self.also))


def too_small(nbytes: int, min_bytes: int) -> str | None:
    """Why a storage of so many bytes is kept, or None."""
    return f"smaller than min_bytes={min_bytes}" if nbytes < min_bytes else None


class Quota:
    """A quota counts the bytes that one call of a layer has saved so far, and those of them that were sent."""

    __slots__ = ("saved", "sent")

    def __init__(self) -> None:
        self.saved = self.sent = 0


@dataclass(frozen=True)
class Policy:
    """A `Policy` says which saved tensors move: all that nothing here excludes, in the order in which they are saved.

    offload      globs of names; one of them has to match, or match another name of the same tensor
    keep         globs of names that stay; they go before `offload`
    where        a predicate over `Candidate`, for the rest
    min_bytes    smaller storages stay
    layer_bytes  at most so many bytes of one call of a layer
    fraction     at most this share of the bytes that a call saves, 0 to 1
    quantize     globs of names that may leave as float8 codes, in half of bfloat16's bytes: all names of a tensor have
                 to match. What comes back is rounded (`codes.py` has the bound); by default nothing is. Beside a peak
                 the planner says which of them do, else all that leave

    Raises FuseOpsError for a value of the wrong kind.
    """

    offload: str | Iterable[str] = ("**",)
    keep: str | Iterable[str] = ()
    where: Callable[[Candidate], bool] | None = None
    min_bytes: int = DEFAULT_MIN_BYTES
    layer_bytes: int | None = None
    fraction: float = 1.0
    quantize: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", as_globs(self.offload, "Policy(offload=...)"))
        object.__setattr__(self, "keep", as_globs(self.keep, "Policy(keep=...)"))
        object.__setattr__(self, "quantize", as_globs(self.quantize, "Policy(quantize=...)"))
        check_integers("Policy", 0, min_bytes=self.min_bytes)
        if self.layer_bytes is not None:
            check_integers("Policy", 0, layer_bytes=self.layer_bytes)
        if not isinstance(self.fraction, (int, float)) or not 0 <= self.fraction <= 1:
            raise FuseOpsError(f"Policy(fraction=...) expects 0 to 1, got {shown(self.fraction)}.")
        expected = "a function of a Candidate"
        instance_of(self.where, (Callable, NoneType), "Policy(where=...)", expected)

    def check(self, names: Collection[str]) -> None:
        """Raise FuseOpsError for globs that match none of the names of what a step saved, where it saved anything."""
        globs = (*self.offload, *self.keep, *self.quantize)
        unmatched = [g for g in globs if not any(matches(g, name) for name in names)]
        if names and unmatched:
            raise FuseOpsError(
                f"the policy's globs {unmatched} matched no saved tensor. Names are such as {sorted(names)[:3]}."
            )

    @property
    def lasting(self) -> bool:
        """Whether the answer for a candidate is the same in every call: there is no predicate and no quota."""
        return self.where is None and self.layer_bytes is None and self.fraction == 1

    def why_keep(self, candidate: Candidate, quota: Quota) -> str | None:
        """Why a tensor is kept, or None; then it counts in the quota of its call."""
        quota.saved += candidate.nbytes
        reason = self._why(candidate, quota)
        if reason is None:
            quota.sent += candidate.nbytes
        return reason

    def _why(self, candidate: Candidate, quota: Quota) -> str | None:
        for glob in self.keep:
            if candidate.matches(glob):
                return f"policy keeps {glob!r}"
        if not any(map(candidate.matches, self.offload)):
            return "no glob of the policy matches"
        if self.where is not None and not self.where(candidate):
            return "the policy's predicate says no"
        small = too_small(candidate.nbytes, self.min_bytes)
        if small is not None:
            return small
        sent = quota.sent + candidate.nbytes
        if self.layer_bytes is not None and sent > self.layer_bytes:
            return f"layer_bytes={self.layer_bytes} reached"
        if sent > self.fraction * quota.saved:
            return f"fraction={self.fraction} reached"
        return None
