"""Copies of functions that dynamo traces without guards on global names: those names are in closures instead.

Dynamo guards on every global name that traced code reads, builtins included. It does not guard on the closure cells of
a method of an object that the trace itself makes, from a class that it gets as a constant.
"""

import __future__

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


def guard_free(functions: Sequence[Function]) -> type:
    """A class whose static method `run` is a copy of the last function, with closure cells in place of global names.

    Functions before it, which it may call, are copied in the same way.
    """
    copies: dict[Function, Function] = {}
    for function in functions:
        copies[function] = _with_cells(function, copies)
    return type("Closed", (), {"run": staticmethod(copies[functions[-1]])})


def _with_cells(function: Any, copies: dict[Function, Function]) -> Function:
    """A copy of a function with closure cells for its global names and builtins.

    copies: of functions that it may call.  Without source it is the function itself, which is traced with more guards.
    """
    try:
        lines, first_line = inspect.getsourcelines(function)
    except OSError:
        return function
    (definition,) = ast.parse(textwrap.dedent("".join(lines))).body
    available = vars(builtins) | function.__globals__
    named = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    cells = {name: available[name] for name in sorted(named & available.keys())}
    source = f"def make({', '.join(cells)}):\n return {function.__name__}"
    tree = ast.parse(source)
    tree.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
    ast.increment_lineno(tree, first_line - 1)  # errors show the lines of the function
    namespace: dict[str, Any] = {}
    # names in annotations may exist for type checkers only
    flags = __future__.annotations.compiler_flag
    code = compile(tree, function.__code__.co_filename, "exec", flags)
    exec(code, function.__globals__, namespace)
    copy: Function = namespace["make"](
        *(copies.get(v, v) if inspect.isfunction(v) else v for v in cells.values())
    )
    return copy
