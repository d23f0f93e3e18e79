"""Names of saved tensors, and the ops that save them.

For ops of fuseops the bridge publishes the name before the tensor is saved. For ops of torch a pack hook gets neither
the module nor the op, so the name is `<path>.<grad_fn>.<number>`: the path of the running module, where a root is
known; the grad_fn of the tensor, which is the op that made it ("leaf" without one, "compiled" for all that a compiled
region saves); and a number in save order.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from types import FrameType

from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.globs import matches
from fuseops.ops import names
from fuseops.ops.names import SavedName
from fuseops.ops.op import Op
from fuseops.ops.paths import prefix_of, stripped, walk
from fuseops.run.composed import Composed

from . import modules

ATTENTION = "ScaledDotProductAttentionBackward0"
RMS_NORM = "FusedRmsNormBackward"  # in a dry run, without the number that torch gives its nodes


def paths_under(root: nn.Module) -> dict[int, str]:
    """Maps the id of every module to its path, without the prefixes of wrappers."""
    return {id(module): stripped(path) for path, module in walk(root)}


class _Kind:
    """A `_Kind` caches the names of tensors that one kind of node saves in a module, by number."""

    __slots__ = ("lasts", "names", "op", "owners", "stem")

    def __init__(self, path: str, made_by: str, owner: nn.Module | None, lasts: bool) -> None:
        self.stem = f"{path}.{made_by}" if path else made_by
        self.op = made_by if owner is None else type(owner).__name__
        self.owners = tuple(weakref.ref(m) for m in (owner,) if m is not None)
        self.lasts, self.names = lasts, dict[int, SavedName]()

    def numbered(self, number: int) -> SavedName:
        name = SavedName((f"{self.stem}.{number}",), False, self.op, self.owners, self.lasts)
        return self.names.setdefault(number, name)


def _forget(paths: dict[int, str], number: int, gone: object) -> None:
    paths.pop(number, None)


class Labels:
    """`Labels` name the saved tensors of one scope. Numbers restart after a backward, so that every step has the same
    names.
    """

    def __init__(self, paths: dict[int, str] | None) -> None:
        self.paths = paths or {}
        self._numbers: dict[str, int] = {}
        self._alive: list[weakref.ref[nn.Module]] = []
        # for modules that have a path; the key is module id, class and grad_fn
        self._kinds: dict[tuple[int, type, str], _Kind] = {}

    @classmethod
    def under(cls, root: nn.Module) -> "Labels":
        """Labels with the paths of a model's modules, while these live: another module may get the id of one that is
        gone.
        """
        labels = cls(None)
        for path, module in walk(root):
            labels.paths[id(module)] = stripped(path)
            forget = partial(_forget, labels.paths, id(module))
            labels._alive.append(weakref.ref(module, forget))
        return labels

    def restart(self) -> None:
        self._numbers.clear()

    def restarted(self) -> "Labels":
        """Labels with the same paths and cached names, and numbers from 0."""
        labels = Labels(self.paths)
        labels._kinds = self._kinds
        return labels

    def name_torch_saved(self, t: Tensor, caller: FrameType | None) -> SavedName:
        """Names a tensor that no op of fuseops saves.   caller: the frame that called the pack hook"""
        running, node = modules.thread.running, t.grad_fn
        made_by = "leaf" if node is None else node.name()
        if made_by == torch_private.FSDP_WATCHES:
            node = torch_private.producer(t)
            made_by = "leaf" if node is None else node.name()
        region = torch_private.compiled_region(caller)
        if region is not None:  # one node for all of it
            running, made_by = region[::-1] or running, "compiled"
        module = running[-1] if running else None
        kind = self._kinds.get((id(module), type(module), made_by))
        if kind is None or kind.owners[0]() is not module:
            kind = self._kind(running, made_by)
        number = self._numbers.get(kind.stem, 0)
        self._numbers[kind.stem] = number + 1
        return kind.names.get(number) or kind.numbered(number)

    def _kind(self, running: Sequence[nn.Module], made_by: str) -> _Kind:
        module = running[-1] if running else None
        lasts = module is not None and id(module) in self.paths
        kind = _Kind(modules.path_in(self.paths, running), _node_name(made_by), module, lasts)
        if lasts:
            self._kinds[id(module), type(module), made_by] = kind
        return kind


def _node_name(name: str) -> str:
    """Maps a grad_fn's name to the one used on CUDA: one for all attention kernels, and RMSNorm's for its name in a dry
    run. So plans made without a GPU match runs on one.
    """
    if name == RMS_NORM:
        return f"{name}0"
    return ATTENTION if name.startswith(ATTENTION.partition("Attention")[0]) else name


def owners_of(saved: SavedName) -> tuple[nn.Module, ...]:
    """The modules that save the tensor that is being packed. For a name of the bridge's they are children of the
    running Sequential, or an op that is called alone.
    """
    if saved.owners is not None:
        return tuple(module for ref in saved.owners if (module := ref()) is not None)
    running = modules.thread.running
    if not running:
        return ()
    module = running[-1]
    if isinstance(module, Op):
        return (module,)
    if not isinstance(module, Composed):
        return ()
    prefix = prefix_of(module)
    if prefix is None:
        outermost = names.thread.outermost
        prefix = "" if outermost is None else outermost.prefix(module)
    children = (_child(module, name.removeprefix(prefix)) for name in saved.names)
    return tuple(child for child in children if child is not None)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """The module that saves a tensor of this name: a child, or a child of a nested Sequential that is inlined."""
    at, _, rest = name.partition(".")
    child = module._modules.get(at)
    return _child(child, rest) if isinstance(child, Composed) else child


def _example_globs(model: nn.Module, paths: dict[int, str]) -> list[str]:
    """Example globs for messages: the members of each list of modules, or, where there is none, single modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    found = [f"{paths[id(m)]}.*".lstrip(".") for m in lists]
    return found[:3] or [path for path in paths.values() if path][:5]


def matching_modules(model: nn.Module, globs: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules whose paths match globs, by path, in the order of the model.

    Raises FuseOpsError for a glob that matches nothing.
    """
    paths = paths_under(model)
    found: dict[str, nn.Module] = {}
    used: set[str] = set()
    for module in model.modules():
        path = paths[id(module)]
        hits = [g for g in globs if path and matches(g, path)]
        used.update(hits)
        if hits:
            found.setdefault(path, module)
    unmatched = [g for g in globs if g not in used]
    if unmatched or not globs:
        raise FuseOpsError(
            f"layers={unmatched} matches no module. Globs are such as {_example_globs(model, paths)}."
        )
    return found
