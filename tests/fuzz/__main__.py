"""Random programs against plain torch, a loop over experts and a twin that offloads nothing: `make fuzz N=10000`.

One that fails is printed as its kind and seed, and as a script that fails by itself.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from programs import KINDS, begin, failure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many, of all kinds")
    parser.add_argument("--seed", type=int, help="the first one; by default of the clock")
    parser.add_argument("--kind", choices=[*KINDS], action="append", help="by default every kind")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after that")
    args = parser.parse_args(argv)
    kinds = args.kind or [*KINDS]
    first = time.time_ns() // 10**6 if args.seed is None else args.seed
    jobs = ((kinds[k % len(kinds)], first + k // len(kinds)) for k in range(args.programs))
    end = time.monotonic() + 60 * args.minutes
    ran, failed = Counter[str](), 0
    with multiprocessing.get_context("spawn").Pool(args.jobs, begin) as pool:
        while time.monotonic() < end and (batch := [*itertools.islice(jobs, 64 * args.jobs)]):
            for (kind, _), told in zip(batch, pool.imap(failure, batch, 8), strict=True):
                ran[kind] += 1
                failed += told is not None
                if told:
                    print(told, flush=True)
    counts = ", ".join(f"{n} {kind}" for kind, n in ran.items())
    print(f"{ran.total()} programs from seed {first} on ({counts}): {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
