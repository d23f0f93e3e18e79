"""What the ahead-of-time table knows a kernel by changes with what is compiled, and with nothing else."""

import importlib.util
import itertools
import pkgutil
import re
import textwrap

import pytest

import fuseops.kernels
from fuseops.kernels.launch import device
from fuseops.kernels.source import _digest_of, source_of

PROGRAM = """
    from types import SimpleNamespace

    BLOCK = SimpleNamespace(value=128)

    class jit:
        def __init__(self, fn):
            self.fn = fn

    @jit
    def offset(row, stride):
        \"\"\"Where a row begins.\"\"\"
        return row * stride - BLOCK  # in elements

    @jit
    def halves(x, DEPTH):
        return halves(x // 2, DEPTH - 1) if DEPTH else x

    @jit
    def kernel(x_ptr, R):
        start = offset(R, stride=2)
        for i in range(R):
            other = halves(start, 3) + i
            start, other = other, start
        return x_ptr + start
"""
NUMBERED = itertools.count()


def source(tmp_path, **words):
    """The source of `kernel`, in a module of PROGRAM with words replaced."""
    text = textwrap.dedent(PROGRAM)
    for old, new in words.items():
        text, count = re.subn(rf"\b{old}\b", new, text)
        assert count, old
    name = f"fuseops_sample_{next(NUMBERED)}"
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return source_of(module.kernel)


def test_names_of_what_is_local_change_nothing(tmp_path):
    renamed = {
        "offset": "row_start", "row": "token", "stride": "pitch", "BLOCK": "TILE", "halves": "fold",
        "DEPTH": "LEVELS", "start": "first", "i": "step", "other": "later",
    }  # fmt: skip
    assert source(tmp_path) == source(tmp_path, **renamed, begins="lies", elements="numbers")


@pytest.mark.parametrize(
    "old, new",
    [
        ("128", "64"),  # a constant
        ("- BLOCK", "+ BLOCK"),  # a device function
        ("row * stride", "stride * row"),
        ("row, stride", "stride, row"),  # whose parameters one call gives by name
        ("DEPTH else x", "DEPTH else 1"),
        ("other, start\n", "start, other\n"),
        ("x_ptr", "y_ptr"),  # rows are told by what a kernel is given
        ("def kernel", "def kernel_of_another_name"),
    ],
)
def test_what_is_compiled_changes_it(tmp_path, monkeypatch, old, new):
    before = source(tmp_path)
    assert PROGRAM.count(old)
    changed = PROGRAM.replace(old, new)
    if "another_name" in new:
        changed += "\n    kernel = kernel_of_another_name\n"
    monkeypatch.setitem(globals(), "PROGRAM", changed)
    assert source(tmp_path) != before


def test_device_functions_and_constants_have_one_home():
    """No two device functions are the same but for names, and no constant stands in two modules."""
    functions, constants = {}, {}
    for info in pkgutil.iter_modules([f"{fuseops.kernels.__path__[0]}/device"]):
        for name, value in vars(device(info.name)).items():
            if hasattr(value, "fn") and "fuseops" in value.fn.__module__:
                home = functions.setdefault(_digest_of(value), value.fn)
                assert home is value.fn, f"{info.name}.{name} is {home.__module__}.{home.__name__}"
            elif hasattr(value, "value"):
                home = constants.setdefault(name, value)
                alone = home is value or home.value != value.value
                assert alone, f"{info.name}.{name} stands elsewhere too"
