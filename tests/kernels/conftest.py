"""Kernel tests: in Triton's CPU interpreter without a GPU, and on one with ``-m gpu``."""

import os
import sys

import pytest
import torch

GPU = torch.cuda.is_available()

if not GPU and "triton" not in sys.modules and "fuseops.kernels.registry" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    from fuseops.kernels.registry import INTERPRET

    for item in items:
        needs_kernels = "kernels" in item.fixturenames
        if needs_kernels and GPU:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif ("interpreted" in item.fixturenames and not INTERPRET) or (
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
