"""Any order of changes and calls: each call is that of a Sequential which never ran, and a backward that comes late is
that of the forward it belongs to, or an error."""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from test_plan_cache import fresh
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops import GELU, Bias, ConstantScale, Dropout, Linear, RMSNorm, SiLU

Seq = fo.Sequential


def model() -> Seq:
    torch.manual_seed(4)
    return Seq(
        RMSNorm(8), Linear(8, 16), Bias(16), SiLU(), Dropout(0.5), ConstantScale(2.0), Linear(16, 8)
    )


def linears(seq: Seq) -> list[Linear]:
    return [op for op in seq if isinstance(op, Linear)]


def tie(seq: Seq) -> None:
    """Two parameters become one."""
    seq[2].bias = linears(seq)[0].bias


def new_weight(seq: Seq) -> None:
    op = linears(seq)[-1]
    op.weight = nn.Parameter(op.weight.detach() * 2)


def other_data(seq: Seq) -> None:
    for p in seq.parameters():
        p.data = p.data * 1.5


def step(seq: Seq) -> None:
    """As an optimizer: in place, seen by autograd."""
    with torch.no_grad():
        for p in seq.parameters():
            p.add_(0.01)


def to_and_fro(seq: Seq) -> None:
    seq.double().float()


CHANGES: dict[str, Callable[[Seq], Any]] = {
    "train": lambda s: s.train(),
    "eval": lambda s: s.eval(),
    "another activation": lambda s: s.__setitem__(3, GELU() if type(s[3]) is SiLU else SiLU()),
    "freeze": lambda s: s.requires_grad_(False),
    "thaw": lambda s: s.requires_grad_(True),
    "freeze a weight": lambda s: linears(s)[-1].weight.requires_grad_(False),
    "freeze a bias": lambda s: s[2].bias.requires_grad_(False),
    "tie": tie,
    "new weight": new_weight,
    "other data": other_data,
    "step": step,
    "to and fro": to_and_fro,
    "scale": lambda s: setattr(s[5], "scale", s[5].scale + 0.5),
    "eps": lambda s: setattr(s[0], "eps", 0.25 if s[0].eps is None else None),
    "p": lambda s: setattr(s[4], "p", 0.75 - s[4].p),
    "fusion off": lambda s: fo.configure(s, fusion=False),
    "fusion on": lambda s: fo.configure(s, fusion=True),
    "blocks": lambda s: fo.configure(s, recipe=fo.recipes.Float8BlockScaling()),
    "high precision": lambda s: fo.configure(s, recipe=None),
    "a hook": lambda s: s[3].register_forward_hook(lambda m, i, o: o * 0.5),
    "no hooks": lambda s: s[3]._forward_hooks.clear(),
    "explain": lambda s: s.plan(torch.randn(2, 8)),
    "main_grad": lambda s: setattr(linears(s)[-1], "delays", ("weight",)),
    "no delays": lambda s: setattr(linears(s)[-1], "delays", ()),
}
IN_PLACE = {"step"}
BEHIND_AUTOGRAD = {"other data", "to and fro"}  # `.data = ...`, of which no graph of torch's knows

ROWS = st.sampled_from([0, 1, 3, 64])
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "frozen x": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "reference": fo.reference,
}


class Pending:
    """A forward whose backward has not run yet, and what it must give."""

    def __init__(self, wanted: list[Tensor], y: Tensor, expected: list[Tensor | None]) -> None:
        self.wanted, self.y, self.expected, self.written = wanted, y, expected, False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.seq = model()
        self.pending: list[Pending] = []

    @rule(what=st.sampled_from(sorted(CHANGES)))
    def change(self, what: str) -> None:
        CHANGES[what](self.seq)
        if what in BEHIND_AUTOGRAD:
            self.pending.clear()
        for p in self.pending:
            p.written |= what in IN_PLACE

    @rule(how=st.sampled_from([copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]))
    def go_on_with_a_copy(self, how: Callable[[Seq], Seq]) -> None:
        if not self.seq[3]._forward_hooks:  # which no pickle takes
            self.seq = how(self.seq)

    @rule(rows=ROWS, mode=st.sampled_from(sorted(CONTEXTS)), late=st.booleans())
    def call(self, rows: int, mode: str, late: bool) -> None:
        ours, theirs = (self.run(seq, rows, mode) for seq in (self.seq, fresh(self.seq)))
        assert ours.y.dtype is theirs.y.dtype and torch.equal(ours.y, theirs.y)
        assert ours.y.requires_grad is theirs.y.requires_grad
        if ours.y.requires_grad:
            ours.expected = self.gradients(theirs)
            self.pending.append(ours)
            if not late:
                self.backward()

    @precondition(lambda self: self.pending)
    @rule()
    def backward(self) -> None:
        pending = self.pending.pop()
        # what was frozen since is no longer asked for
        left = [
            (t, d) for t, d in zip(pending.wanted, pending.expected, strict=True) if t.requires_grad
        ]
        if not left:
            return
        pending.wanted, pending.expected = map(list, zip(*left, strict=True))
        try:
            found = self.gradients(pending)
        except RuntimeError as error:
            assert pending.written and "modified by an inplace operation" in str(error)
            return
        for ours, theirs in zip(found, pending.expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def run(self, seq: Seq, rows: int, mode: str) -> Pending:
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        x.requires_grad_(mode != "frozen x")
        torch.manual_seed(11)
        with CONTEXTS[mode]():
            y = seq(x)
        wanted = [t for t in (x, *seq.parameters()) if t.requires_grad]
        return Pending(wanted, y, [])

    def gradients(self, call: Pending) -> list[Tensor | None]:
        loss = call.y.double().square().sum()
        return list(torch.autograd.grad(loss, call.wanted, allow_unused=True))


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=20)
