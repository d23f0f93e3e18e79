"""What a run costs the host, in Python functions called, which no clock makes noisy."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch


def calls_in(run: Callable[[], Any]) -> int:
    """Python functions that are called, the backward in this thread too."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and not frame.f_code.co_name.startswith("<")

    gc.collect()
    gc.disable()  # what others left behind ends in calls of its own
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(seen)
        try:
            run()
        finally:
            sys.setprofile(None)
            gc.enable()
    return count
