"""Kernel tests: `TRITON_INTERPRET=1 pytest tests/kernels` in Triton's CPU interpreter, `-m gpu` on a GPU.

Triton decides when it is first imported, so the interpreter wants a process of its own (`make test` gives it one).
"""

import pytest
import torch

GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    from fuseops.kernels.launch import INTERPRET

    for item in items:
        needs_kernels = "kernels" in item.fixturenames
        if needs_kernels and GPU:
            item.add_marker("gpu")
        if ("interpreted" in item.fixturenames and not INTERPRET) or (
            needs_kernels and not (INTERPRET or GPU)
        ):
            item.add_marker(
                pytest.mark.skip(
                    reason="needs its own process: TRITON_INTERPRET=1 pytest tests/kernels"
                )
            )


@pytest.fixture
def interpreted():
    """Asked for by tests of the interpreter itself."""


@pytest.fixture
def kernels():
    """Asked for by tests that run Triton kernels: interpreted, or on the GPU, where they carry the
    mark ``gpu``.
    """
