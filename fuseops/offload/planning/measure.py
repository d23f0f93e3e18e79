"""Times a CUDA device: the figures of `Hardware.measure()`, medians of rounds after a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from fuseops import torch_private
from fuseops.offload.lanes.cuda import pinned, unpin

MIB = 1 << 20
SIZES = tuple(MIB << k for k in range(0, 9, 2))  # 1 MiB to 256 MiB
AREA = 1 << 30  # host bytes that are copied in turn: more than caches hold, as in a step
ROUNDS = 9
HOT = 0.15  # seconds until power limits the clock
Parts = Iterator[torch.Tensor]


def copy_rates(
    meet: Callable[[], object] = lambda: None,
) -> dict[str, tuple[tuple[int, float], ...]]:
    """(bytes, GB/s) of copies out, back and both ways at once, over SIZES.

    meet  a barrier of all ranks that measure, so that they copy at the same time
    """
    here = torch.device("cuda", torch.cuda.current_device())
    areas = [pinned(AREA) for _ in range(2)]  # as in a step
    try:
        return _copy_rates(areas, here, meet)
    finally:
        unpin(here, areas)


def _copy_rates(
    areas: list[torch.Tensor], here: torch.device, meet: Callable[[], object]
) -> dict[str, tuple[tuple[int, float], ...]]:
    points: dict[str, list[tuple[int, float]]] = {"d2h": [], "h2d": [], "both": []}
    out, back = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for size in SIZES:
        device = [torch.empty(size, dtype=torch.uint8, device=here) for _ in range(2)]
        host: list[Parts] = [cycle(area.view(-1, size).unbind()) for area in areas]
        repeat = max(2, (256 * MIB) // size)  # back to back, as a schedule queues them

        def down(device: list[torch.Tensor] = device, host: list[Parts] = host) -> None:
            next(host[0]).copy_(device[0], non_blocking=True)

        def up(device: list[torch.Tensor] = device, host: list[Parts] = host) -> None:
            device[1].copy_(next(host[1]), non_blocking=True)

        for name, works in (
            ("d2h", ((out, down),)),
            ("h2d", ((back, up),)),
            ("both", ((out, down), (back, up))),
        ):
            seconds = _seconds(works, repeat, meet)
            points[name].append((size, _digits(len(works) * size / seconds / 1e9)))
    return {name: tuple(curve) for name, curve in points.items()}


def network_rate(group: dist.ProcessGroup) -> float:
    """GB/s that this rank sends to the others while every rank sends all of them as much.  0: it is alone"""
    ranks = dist.get_world_size(group)
    sent = torch.empty(256 * MIB // ranks * ranks, dtype=torch.uint8, device="cuda")
    got = torch.empty_like(sent)
    works = ((torch.cuda.current_stream(), lambda: dist.all_to_all_single(got, sent, group=group)),)
    seconds = _seconds(works, 4, partial(dist.barrier, group))
    return _digits(sent.numel() * (ranks - 1) / ranks / seconds / 1e9)


def memory_rate() -> float:
    """GB/s of a device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    works = ((torch.cuda.current_stream(), lambda: target.copy_(source)),)
    return _digits(2 * source.numel() / _seconds(works, 2) / 1e9)


def matmul_dtypes(arch: int) -> tuple[torch.dtype, ...]:
    fp8 = (torch.float8_e4m3fn,) if arch >= 89 else ()
    return (torch.bfloat16, torch.float16, torch.float32, *fp8)


def matmul_rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a square product of random data."""
    n = 2048 if dtype is torch.float32 else 8192
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def work() -> torch.Tensor:
        if dtype is not torch.float8_e4m3fn:
            return torch.mm(a, b)
        return torch_private.scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return _digits(2 * n**3 / _hot_seconds(work) / 1e12)


def transposing_rate() -> float:
    """GB/s of queries from (batch, heads, tokens, width) to (batch, tokens, heads, width)."""
    source = torch.randn(8, 16, 4096, 128, device="cuda").to(torch.bfloat16).transpose(1, 2)
    works = ((torch.cuda.current_stream(), source.contiguous),)
    return _digits(2 * source.nbytes / _seconds(works, 10) / 1e9)


def launch_seconds() -> float:
    """Seconds from one kernel to the next, where kernels wait for each other and not for the host."""
    kernels, one = 50, torch.ones((), device="cuda")
    works = ((torch.cuda.current_stream(), lambda: one.add_(1)),)
    # cycles, about 10 us for each kernel, in which the host launches it
    return _digits(_seconds(works, kernels, partial(torch_private.occupy_device, 20_000 * kernels)))


def attention_rate() -> tuple[float, str]:
    """TFLOP/s of causal attention, forward and backward, and the name of the node that torch chose for it."""
    shape = batch, heads, tokens, width = (8, 8, 4096, 128)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    dy = torch.randn_like(q)

    def work() -> None:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), dy)

    flops = (4 + 10) * batch * heads * tokens**2 * width / 2
    rate = _digits(flops / _hot_seconds(work) / 1e12)
    node = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).grad_fn
    return rate, "" if node is None else node.name().lower()


Work = tuple[torch.cuda.Stream, Callable[[], object]]


def _seconds(
    works: tuple[Work, ...], repeat: int, meet: Callable[[], object] = lambda: None
) -> float:
    """Seconds of one call of each work, all streams at once: the median of ROUNDS of `repeat`.

    meet  is called before each round
    """
    rounds = []
    main = torch.cuda.current_stream()
    for _ in range(ROUNDS + 2):  # the first two warm up
        start, stop = (event() for _ in range(2))
        main.synchronize()
        meet()
        main.record_event(start)
        for stream, work in works:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(repeat):
                    work()
        for stream, _ in works:
            main.wait_stream(stream)
        main.record_event(stop)
        stop.synchronize()
        rounds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(rounds[2:]) / repeat


def _hot_seconds(work: Callable[[], object]) -> float:
    """Seconds of one call on a device as hot as in training, after HOT seconds of calls."""
    repeat = max(2, int(HOT / _seconds(((torch.cuda.current_stream(), work),), 1)))
    start, stop = event(), event()
    for mark in (stop, start):  # twice without a pause; only the second time counts
        mark.record()
        for _ in range(repeat):
            work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeat / 1e3


def event() -> torch.cuda.Event:
    """A CUDA event with timing enabled."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _digits(value: float) -> float:
    """Rounds to four significant digits."""
    return float(f"{value:.4g}")
