"""The source of a kernel as its compiler sees it: without comments, docstrings and the names of what is local to it.

A row of the ahead-of-time table is fresh while this text is the same, so a name that is made clearer needs no kernel
compiled anew, and a check that finds nothing stale is a proof that kernels compute what they did. (Triton lists what an
`if` or a loop carries by name, so registers may be given out in another order.)
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from typing import Any


@functools.cache
def source_of(kernel: Any) -> str:
    """The source of a kernel. Its own name and its parameters' stay: rows are told by them.

    Unparsed text, which is the same in every Python, while dumps of the tree differ.
    """
    return _unnamed(kernel, keep_parameters=True)


@functools.cache
def _digest_of(function: Any) -> str:
    """A hash of a device function."""
    return hashlib.sha256(_unnamed(function, keep_parameters=False).encode()).hexdigest()[:16]


def _unnamed(kernel: Any, keep_parameters: bool) -> str:
    fn = getattr(kernel, "fn", kernel)
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    function: Any = tree.body[0]
    if ast.get_docstring(function) is not None:
        del function.body[0]
    parameters = list(inspect.signature(fn).parameters)
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    stored = [name.id for name in names if isinstance(name.ctx, ast.Store)]
    local = {name: f"_{i}" for i, name in enumerate(dict.fromkeys(parameters + stored))}
    if keep_parameters:
        local |= {name: name for name in parameters}
    else:
        function.name = "_"
    return ast.unparse(_Unnamed(local, fn).visit(tree))


class _Unnamed(ast.NodeTransformer):
    """`_Unnamed` numbers locals, and writes what else a name stands for in its place: a constant, or a device function
    by its hash.
    """

    def __init__(self, local: dict[str, str], fn: Any) -> None:
        self.local, self.fn = local, fn

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.local[node.arg]
        return node  # its annotation says what is a constant

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.local:
            return ast.Name(self.local[node.id], node.ctx)
        value = self._device_function(node.id)
        if value is not None:
            itself = value.fn is self.fn
            return ast.Name(f"<{'itself' if itself else _digest_of(value)}>", node.ctx)
        value = self.fn.__globals__.get(node.id)
        return ast.Name(f"<{value.value}>", node.ctx) if hasattr(value, "value") else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called: Any = isinstance(node.func, ast.Name) and self._device_function(node.func.id)
        if called:  # arguments given by name, as those of a place
            places = list(inspect.signature(called.fn).parameters)
            for keyword in node.keywords:
                keyword.arg = f"_{places.index(str(keyword.arg))}"
        return self.generic_visit(node)

    def _device_function(self, name: str) -> Any:
        value: Any = None if name in self.local else self.fn.__globals__.get(name)
        return value if hasattr(value, "fn") and "fuseops" in value.fn.__module__ else None
