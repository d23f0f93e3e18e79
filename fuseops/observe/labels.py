"""Labels say how a saved tensor is called, and which ops save it.

Ops of fuseops: the bridge promises the name before it saves. Everything else is torch's: a pack
hook is told neither the module nor the op that saves, so the name is made of what can be known: the
path of the running module, where a root is known, and the grad_fn of the tensor, that is of the op
that made it ("leaf" without one; "compiled" for all that a compiled region saves), numbered in save order.
"""

import weakref
from collections.abc import Sequence
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
RMS_NORM = "FusedRmsNormBackward"  # of a dry run; torch numbers its own


def paths_under(root: nn.Module) -> dict[int, str]:
    """The path of every module by id, without the prefixes of wrappers."""
    return {id(module): stripped(path) for path, module in walk(root)}


class _Kind:
    """A `_Kind` has the names of what one kind of node saves in a module, by number."""

    __slots__ = ("lasts", "names", "op", "owners", "stem")

    def __init__(self, path: str, made_by: str, owner: nn.Module | None, lasts: bool) -> None:
        self.stem = f"{path}.{made_by}" if path else made_by
        self.op = made_by if owner is None else type(owner).__name__
        self.owners = tuple(weakref.ref(m) for m in (owner,) if m is not None)
        self.lasts, self.names = lasts, dict[int, SavedName]()

    def numbered(self, number: int) -> SavedName:
        name = SavedName((f"{self.stem}.{number}",), False, self.op, self.owners, self.lasts)
        return self.names.setdefault(number, name)


class Labels:
    """`Labels` name the saved tensors of one scope. Numbers start again after a backward, so that every step has the
    same names.
    """

    def __init__(self, paths: dict[int, str] | None) -> None:
        self.paths = paths or {}
        self._numbers: dict[str, int] = {}
        # of modules that have a path, by id, class and node
        self._kinds: dict[tuple[int, type, str], _Kind] = {}

    def start_again(self) -> None:
        self._numbers.clear()

    def from_0(self) -> "Labels":
        """Others that give the same names, and count for themselves."""
        labels = Labels(self.paths)
        labels._kinds = self._kinds
        return labels

    def of_torch(self, t: Tensor, below: FrameType | None) -> SavedName:
        """Names a tensor that no op of fuseops saves. below: the frame that called the pack hook"""
        running, node = modules.thread.running, t.grad_fn
        made_by = "leaf" if node is None else node.name()
        if made_by == torch_private.FSDP_WATCHES:
            node = torch_private.producer(t)
            made_by = "leaf" if node is None else node.name()
        region = torch_private.compiled_region(below)
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
    """Gives all kernels of attention one name, and RMSNorm of a dry run that of CUDA's kernel, so that a plan made
    without a GPU has the names of a run on one.
    """
    if name == RMS_NORM:
        return f"{name}0"
    return ATTENTION if name.startswith(ATTENTION.partition("Attention")[0]) else name


def owners_of(saved: SavedName) -> tuple[nn.Module, ...]:
    """The modules that save a tensor that is being packed. Behind names of the bridge's they are children of the
    Sequential that runs, or an op that is called alone.
    """
    if saved.owners is not None:
        return tuple(module for of in saved.owners if (module := of()) is not None)
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
    """What saves a tensor of this name: a child, or one of a Sequential that is spliced into the plan."""
    at, _, rest = name.partition(".")
    child = module._modules.get(at)
    return _child(child, rest) if isinstance(child, Composed) else child


def _globs(model: nn.Module, paths: dict[int, str]) -> list[str]:
    """Some that match: the members of each list of modules, or, where there is none, single modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    found = [f"{paths[id(m)]}.*".lstrip(".") for m in lists]
    return found[:3] or [path for path in paths.values() if path][:5]


def matching(model: nn.Module, globs: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that globs name, by path, in the order of the model.

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
    idle = [g for g in globs if g not in used]
    if idle or not globs:
        raise FuseOpsError(
            f"layers={idle} matches no module. Globs are such as {_globs(model, paths)}."
        )
    return found
