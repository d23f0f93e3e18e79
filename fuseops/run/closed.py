"""Traced code without guards on what it names, which is in closures.

Dynamo guards on every global name that traced code reads, a builtin too. It does not on the cells of a function that it
was led to by no name: that of an object which the trace made itself, of a class that it was told as a constant.
"""

import __future__

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


def closed(functions: Sequence[Function]) -> type:
    """A class whose instances `run` the last of some functions, closed over what it names: where that is one of those
    before it, a copy that is closed over what it names itself.
    """
    known: dict[Function, Function] = {}
    for function in functions:
        known[function] = _closed(function, known)
    return type("Closed", (), {"run": staticmethod(known[functions[-1]])})


def _closed(function: Any, known: dict[Function, Function]) -> Function:
    """A copy of a function that has cells for what it names of its module and of the builtins. Where there is no source
    it is the function itself, which is traced with more guards.

    known: copies of functions that it names
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return function
    (written,) = ast.parse(textwrap.dedent("".join(lines))).body
    there = vars(builtins) | function.__globals__
    named = {node.id for node in ast.walk(written) if isinstance(node, ast.Name)}
    cells = {name: there[name] for name in sorted(named & there.keys())}
    source = f"def make({', '.join(cells)}):\n return {function.__name__}"
    tree = ast.parse(source)
    tree.body[0].body.insert(0, written)  # type: ignore[attr-defined]
    ast.increment_lineno(tree, first - 1)  # errors show the lines of the function
    made: dict[str, Any] = {}
    # what annotations name may be there for type checkers alone
    late = __future__.annotations.compiler_flag
    exec(compile(tree, function.__code__.co_filename, "exec", late), function.__globals__, made)
    copy: Function = made["make"](
        *(known.get(v, v) if inspect.isfunction(v) else v for v in cells.values())
    )
    return copy
