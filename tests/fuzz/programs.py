"""Random programs, as text: a kind and a seed give a script, which raises where the package is wrong."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable
from string import Template

import torch
from plain_acts import UPS
from plain_moe import options

from fuseops.kernels.activation import GATES
from fuseops.offload.lanes import arena
from fuseops.ops.activations import ACTS
from fuseops.ops.glu import GATED, SCALED_GATED
from fuseops.rules.rule import types_of

WIDTHS, ROWS, GROUPS = (4, 6, 8, 10, 16, 34), (5, 1, 0, 17, 64), 3
WIDE, MANY_ROWS = (8, 34, 64, 104, 128, 160, 256, 520), (64, 1, 0, 17, 65, 127, 300, 1030)
CALLS = ("plain", "plain", "checkpoint", "functional_call", "unfused", "reference", "to_host")

ACTIVATIONS = (
    *((f"fo.ops.{op.__name__}()", f"TORCH['{op().kind}'](h)") for op in types_of(ACTS)),
    ("fo.ops.GELU('tanh')", "TORCH['gelu_tanh'](h)"),
)
# (constructor, what it is in plain torch); $w is the width, $n the next one, $p the path, $i a block of columns.
KEEPING = (
    ("fo.ops.Bias($w)", "h + p['$p.bias']"),
    ("fo.ops.RMSNorm($w, eps=1e-3)", "F.rms_norm(h, ($w,), p['$p.weight'], 1e-3)"),
    (
        "fo.ops.LayerNorm($w, eps=1e-3)",
        "F.layer_norm(h, ($w,), p['$p.weight'], p['$p.bias'], 1e-3)",
    ),
    *ACTIVATIONS,
    ("fo.ops.ScaledSReLU()", "TORCH['srelu'](h) * side['probs'][:, None]"),
    ("fo.ops.ConstantScale(-1.5)", "h * -1.5"),
    ("fo.ops.Dropout(0.0)", "h"),
    ("fo.ops.L2Norm(1e-3)", "h * (h.square().sum(-1, True) + 1e-3).rsqrt()"),
    (
        "fo.ops.RMSNorm($w, eps=1e-3, zero_centered_gamma=True)",
        "F.rms_norm(h, ($w,), 1 + p['$p.weight'], 1e-3)",
    ),
    ("fo.ops.Identity()", "h"),
    ("fo.ops.Reshape(-1, $w)", "h"),
    ("nn.Tanh()", "h.tanh()"),
    ("nn.Linear($w, $w)", "F.linear(h, p['$p.weight'], p['$p.bias'])"),
)
MAPPING = (
    ("fo.ops.Linear($w, $n)", "F.linear(h, p['$p.weight'], p['$p.bias'])"),
    ("fo.ops.Linear($w, $n, bias=False)", "F.linear(h, p['$p.weight'])"),
    ("fo.ops.GroupedLinear(3, $w, $n)", "grouped(h, p['$p.weight'], p['$p.bias'], side['offs'])"),
    (
        "fo.ops.GroupedLinear(3, $w, $n, bias=False)",
        "grouped(h, p['$p.weight'], None, side['offs'])",
    ),
)
HALVING = (
    *(
        (
            f"fo.ops.{op.__name__}(interleave=$i)",
            f"gated(TORCH['{GATES[op().kind]}'], h, $i){factor}",
        )
        for ops, factor in ((GATED, ""), (SCALED_GATED, " * side['probs'][:, None]"))
        for op in types_of(ops)
        if op().kind not in UPS
    ),
    ("fo.ops.SiTUGLU(2.0, 3.0)", "situ(*h.chunk(2, -1))"),
)
LINEAR = MAPPING[:2]
# What rules look for, which a draw op by op rarely gives.
PATTERNS = (
    (LINEAR, ACTIVATIONS),
    (LINEAR[1:], KEEPING[:1], ACTIVATIONS),
    (KEEPING[1:2], LINEAR),
    (MAPPING[2:], HALVING, MAPPING[2:]),
)


class Chain:
    """A Sequential and the same in plain torch, written down side by side."""

    def __init__(
        self, rng: random.Random, taps: bool = False, widths: tuple[int, ...] = WIDTHS
    ) -> None:
        self.rng, self.taps, self.widths = rng, taps, widths
        self.plain: list[str] = []
        self.count = 0

    def sequence(
        self, path: str, width: int, size: int, outer: dict[str, int], depth: int = 1
    ) -> tuple[list[str], int]:
        """The constructors of a Sequential and the width behind it.   outer: published around it, with their widths."""
        made: list[str] = []
        known, unread = dict(outer), set[str]()
        for _ in range(size):
            kind = self.rng.choice(
                ("op", "op", "pattern", "inside", *("tap", "add", "swap") * self.taps)
            )
            if kind == "inside" and depth:
                width = self.inside(f"{path}{len(made)}", made, width, known, unread, depth)
            elif kind == "tap":
                name = self.name("t")
                self.emit(made, f"fo.ops.Tap('{name}')", f"{name} = h")
                known[name] = width
                unread.add(name)
            elif kind == "add" and known:
                width = self.add(path, made, width, self.rng.choice([*known]), known, unread)
            elif kind == "swap" and known:
                name, new = self.rng.choice([*known]), self.name("t")
                self.emit(made, f"fo.ops.Swap('{name}', '{new}')", f"h, {new} = {name}, h")
                width, known[new] = known[name], width
                unread.discard(name)
                unread.add(new)
            else:
                for choices in self.rng.choice(PATTERNS) if kind == "pattern" else [None]:
                    width = self.op(path, made, width, choices)
        for name in sorted(unread):
            width = self.add(path, made, width, name, known, unread)
        return made, width

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def emit(self, made: list[str], constructor: str, line: str) -> None:
        made.append(constructor)
        self.plain.append(line)

    def op(self, path: str, made: list[str], width: int, choices: tuple | None = None) -> int:
        """One op, of these choices."""
        table = self.rng.choice((KEEPING, MAPPING, HALVING)) if choices is None else choices
        if table is HALVING and width % 4:  # of two blocks, or of halves that GLUs can take again
            table = LINEAR
        constructor, line = self.rng.choice(table)
        after = self.rng.choice(self.widths) if "$n" in constructor else width
        names = {"w": width, "n": after, "p": f"{path}{len(made)}", "i": self.rng.choice((0, 1, 2))}
        expression = Template(line).substitute(names)
        self.emit(made, Template(constructor).substitute(names), f"h = {expression}")
        return width // 2 if table is HALVING else after

    def fit(self, path: str, made: list[str], width: int, wanted: int) -> int:
        if width != wanted:
            line = f"h = F.linear(h, p['{path}{len(made)}.weight'], p['{path}{len(made)}.bias'])"
            self.emit(made, f"fo.ops.Linear({width}, {wanted})", line)
        return wanted

    def add(
        self,
        path: str,
        made: list[str],
        width: int,
        name: str,
        known: dict[str, int],
        unread: set[str],
    ) -> int:
        width = self.fit(path, made, width, known[name])
        self.emit(made, f"fo.ops.Add('{name}')", f"h = h + {name}")
        unread.discard(name)
        return width

    def inside(
        self,
        path: str,
        made: list[str],
        width: int,
        known: dict[str, int],
        unread: set[str],
        depth: int,
    ) -> int:
        """A Residual or a Sequential in this one."""
        residual, start = self.rng.random() < 0.5, len(self.plain)
        # A Residual is a Sequential whose first module is its Tap.
        inner, after = self.sequence(f"{path}.", width, self.rng.randint(1, 3), known, depth - 1)
        if residual:
            after = self.fit(f"{path}.", inner, after, width)
        lines = self.plain[start:]
        for name in known:
            if any(f"Add('{name}')" in text or f"Swap('{name}'" in text for text in inner):
                unread.discard(name)
        if residual:
            carried = self.name("r")
            self.plain[start:] = [f"{carried} = h", *lines, f"h = h + {carried}"]
        made.append(f"fo.{'Residual' if residual else 'Sequential'}({', '.join(inner)})")
        return after


def chain(rng: random.Random, taps: bool = False) -> str:
    return beside_plain(rng, Chain(rng, taps), rng.choice(ROWS), "same_as_plain")


def tap_graph(rng: random.Random) -> str:
    return chain(rng, taps=True)


def rounded(rng: random.Random) -> str:
    """A chain in a dtype that rounds, at sizes of tiles and beside them: on a GPU, its kernels."""
    dtype = rng.choice(("torch.bfloat16", "torch.float32", "torch.float16"))
    written = Chain(rng, rng.random() < 0.5, WIDE)
    return beside_plain(rng, written, rng.choice(MANY_ROWS), "near_plain", f", dtype={dtype}")


def beside_plain(
    rng: random.Random, written: Chain, rows: int, judge: str, options: str = ""
) -> str:
    width = rng.choice(written.widths)
    made, _ = written.sequence("", width, rng.randint(2, 7), {})
    ends = sorted(rng.choices(range(rows + 1), k=GROUPS))
    frozen = sorted(rng.sample(range(12), rng.choice((0, 0, 3, 8))))
    x_grad, call = rng.random() < 0.8, rng.choice(CALLS)
    said = f"{rows=}, {width=}, offs={ends}, {frozen=}, {x_grad=}, {call=}{options}"
    body = "\n".join(f"    {text}," for text in made)
    plain = "\n".join(f"    {line}" for line in written.plain)
    return f"""model = fo.Sequential(
{body}
)

def plain(h, p, side):
{plain}
    return h

{judge}(model, plain, {said})
"""


def experts(rng: random.Random) -> str:
    drawn = options(lambda *values: rng.choice(values))
    said = ", ".join(f"{name}={value!r}" for name, value in drawn.items())
    kind, top_k = rng.choice(["even", "zipf", "one expert"]), rng.choice([2, 1, 3])
    return f"same_as_loop({kind!r}, top_k={top_k}, tokens={rng.choice([7, 1, 0, 33])}, {said})\n"


def recipe(rng: random.Random) -> str:
    """A chain under a recipe with any options, between writes to its weights."""
    rows, width = rng.choice((5, 1, 130, 300)), rng.choice((16, 34, 128, 160))
    made, _ = Chain(rng).sequence("", width, rng.randint(2, 6), {})
    ends = sorted(rng.choices(range(rows + 1), k=GROUPS))
    formats = "torch.float8_e4m3fn", "torch.float8_e5m2"
    options = {"fwd": rng.choice(formats), "bwd": rng.choice(formats)}
    name = rng.choice(("Float8BlockScaling", "Float8CurrentScaling"))
    if name == "Float8BlockScaling":
        options["wgrad"] = repr(rng.choice(("square", "block", "bf16")))
    said = ", ".join(f"{key}={value}" for key, value in options.items())
    events = [rng.choice(("step", "write", "load", "nothing")) for _ in range(3)]
    body = "\n".join(f"    {text}," for text in made)
    return f"""model = fo.Sequential(
{body}
)
same_unfused_and_kept(model, fo.recipes.{name}, dict({said}), {rows=}, {width=}, offs={ends}, {events=})
"""


WAYS = ("plain", "plain", "layers", "reentrant")


def scheduled(rng: random.Random) -> str:
    """Steps of training in any order, with a Scheduler and without."""
    lines = [
        f"pair = Pair(seed={rng.randrange(1 << 20)}, lag={rng.randint(0, 3)}, ahead={rng.randint(1, 2)}, "
        f"small={rng.choice([0, 300, 1 << 20])}, least={rng.choice([1, 200])}, budget={rng.choice([None, 4096])})"
    ]
    losses: list[str] = []
    attached = True
    for k in range(rng.randint(3, 30)):
        kind = rng.choice(
            ("forward", "forward", "scope", "backward", "backward", "on_loss", "alone", "attach")
        )
        if kind == "forward":
            losses.append(f"loss_{k}")
            lines.append(f"loss_{k} = pair.forward({rng.choice(WAYS)!r})")
        elif kind == "scope":
            losses.append(f"loss_{k}")
            scope = rng.choice(["to_host", "keep", "disabled"])
            lines.append(f"loss_{k} = pair.forward_in_a_scope({rng.choice(WAYS)!r}, {scope!r})")
        elif kind == "alone":
            lines.append(
                f"pair.{rng.choice(['evaluate', 'forward_for_nothing', 'error_in_forward', 'step'])}()"
            )
        elif kind == "attach":
            lines.append("pair.detach()" if attached else "pair.attach()")
            attached = not attached
        elif losses:
            loss = losses.pop(rng.randrange(len(losses)))
            rare = rng.choice(["backward_twice", "error_in_backward", "drop"])
            lines.append(f"pair.{'backward' if kind == 'backward' else rare}({loss})")
            lines.append(f"del {loss}")
    return "\n".join([*lines, "pair.end()", ""])


KINDS: dict[str, Callable[[random.Random], str]] = {
    "chain": chain,
    "taps": tap_graph,
    "moe": experts,
    "scheduler": scheduled,
    "recipe": recipe,
    "rounded": rounded,
}
ON_GPU = ("rounded", "recipe")  # run on one where there is one
HEAD = """import sys
sys.path[:0] = ["tests", "tests/fuzz"]  # from the root of the repository
"""
IMPORTS = """import torch
import torch.nn.functional as F
from torch import nn
import fuseops as fo
from judges import gated, grouped, near_plain, same_as_loop, same_as_plain, same_unfused_and_kept, situ
from offload_pair import Pair
from plain_acts import TORCH

torch.manual_seed({seed})
"""


def program(kind: str, seed: int) -> str:
    """The script of a kind and a seed, always the same."""
    return IMPORTS.format(seed=seed) + KINDS[kind](random.Random(f"{kind} {seed}"))


def failure(job: tuple[str, int]) -> str | None:
    """What a failing program prints: how to run it again, its script, the error. None where it passed."""
    kind, seed = job
    text = program(kind, seed)
    try:
        exec(compile(text, f"<{kind} {seed}>", "exec"), {})
    except Exception:
        again = f"python tests/fuzz --kind {kind} --seed {seed} --programs 1"
        return f"--- {kind}, seed {seed}: {again}\n\n{HEAD}{text}\n{traceback.format_exc(limit=-4)}"
    return None


def begin() -> None:
    """Once in every process that runs programs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # at 64 MiB most of the time of a Scheduler's program goes into poisoning that
    arena.REGION = 1 << 14
