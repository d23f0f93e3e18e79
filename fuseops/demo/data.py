"""The text: sources of the running Python's standard library, and the bigram model to beat."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCAB = 256
HELD_OUT_ONE_IN = 16  # files
SKIP = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Corpus(NamedTuple):
    """A `Corpus` holds the bytes of disjoint sets of files, as uint8 tensors on the CPU."""

    train: Tensor
    held_out: Tensor
    files: int
    root: Path


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, path) of the library's own modules, without tests and installed packages."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIP]
        for name in files:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def read_corpus(
    limit: int = 8_000_000, held_out: int = 160_000, root: Path | None = None
) -> Corpus:
    """At most `limit` bytes to train on and `held_out` bytes to judge by.

    Files come in the order of a digest of their names: the same on every machine, and a mixture
    of the whole library wherever it is cut off. The digest also decides which files are held out,
    so that no file moves between the sets when others appear.
    Raises FileNotFoundError when there is too little to read (the library is zipped, say).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    room = {True: held_out, False: limit}
    for number, _, path in sorted((digest(n), n, p) for n, p in sources(root)):
        aside = number % HELD_OUT_ONE_IN == 0
        if room[aside] > 0:
            parts[aside].append(path.read_bytes()[: room[aside]])
            room[aside] -= len(parts[aside][-1])
    train, judged = b"".join(parts[False]), b"".join(parts[True])
    if min(len(train), len(judged)) < 1024:
        raise FileNotFoundError(f"too few Python sources to learn from in {root}")
    return Corpus(as_tensor(train), as_tensor(judged), sum(map(len, parts.values())), root)


def digest(name: str) -> int:
    """A number that only the name decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def as_tensor(text: bytes) -> Tensor:
    """The bytes as a uint8 tensor of its own."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, length: int) -> Tensor:
    """Windows of `length` + 1 bytes, each to predict its last `length`.   (N, length + 1) int64"""
    return text[: len(text) - len(text) % (length + 1)].view(-1, length + 1).long()


def batch(text: Tensor, size: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows from random places, where text and generator are.   (size, length + 1) int64"""
    where = text.device
    starts = torch.randint(len(text) - length, (size, 1), generator=generator, device=where)
    return text[starts + torch.arange(length + 1, device=where)].long()


def bigram_log_probs(text: Tensor, smoothing: float = 0.3) -> Tensor:
    """log P(next | byte), every count raised by `smoothing`.   (V, V) float64, [byte, next]"""
    pairs = text[:-1].long() * VOCAB + text[1:].long()
    counts = torch.bincount(pairs, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double() + smoothing
    return (counts / counts.sum(1, keepdim=True)).log()


def bigram_loss(log_probs: Tensor, judged: Tensor) -> float:
    """Nats a byte on windows, over exactly the bytes that the model is judged by."""
    return -log_probs[judged[:, :-1], judged[:, 1:]].mean().item()
