"""Reasons why a saved tensor is kept on its device, as the report shows them. No check reads values."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fuseops.observe.labels import owners_of
from fuseops.ops.names import SavedName
from fuseops.plain import PLAIN
from fuseops.torch_private import base_of, is_fake, is_functorch_wrapped, is_zerotensor

from . import marks
from .storages import StorageMap

PARAMETER, BUFFER = "parameter", "buffer of the model"
CAST = "cast copy of a parameter"
# storages that exist anyway: saving them costs no bytes
MODEL_OWNED = frozenset({PARAMETER, BUFFER, CAST})


def why_not_plain(t: Tensor) -> str | None:
    """Why t has no storage that could be copied and rebuilt, or None."""
    if type(t) not in PLAIN:
        return f"{type(t).__name__} is not a plain tensor"
    if is_functorch_wrapped(t):
        return "inside a torch.func transform"
    if t.layout is not torch.strided:
        return f"layout {str(t.layout).removeprefix('torch.')}"
    if t.is_nested:
        return "a nested tensor"
    if t.is_quantized:
        return "a torch quantized tensor"
    if is_zerotensor(t):
        return "zeros without memory"
    if not (t.is_cpu or t.is_cuda):  # KINDS, without the device's name
        return f"no copies for device {t.device.type}"
    return None


def why_no_storage(t: Tensor) -> str | None:
    """`why_not_plain`, for steps of fake tensors too: they have storages without bytes."""
    return None if is_fake(t) and t.layout is torch.strided else why_not_plain(t)


class ModelStorages(StorageMap[str]):
    """`ModelStorages` are the storages that a model owns, so that offloading them would free nothing. They are updated
    at every call.
    """

    def add(self, tensors: Iterable[Tensor | None], what: str) -> None:
        for t in tensors:
            if t is not None and why_no_storage(t) is None:
                storage = t.untyped_storage()
                if self.get(storage) != what:
                    self.set(storage, what)

    def add_model(self, root: nn.Module) -> None:
        self.add(root.buffers(), BUFFER)
        self.add(root.parameters(), PARAMETER)

    def reason(self, t: Tensor, is_param: bool) -> str | None:
        """PARAMETER, BUFFER or None: what t is, or what it is a view or an alias of."""
        if is_param or isinstance(t, nn.Parameter) or isinstance(base_of(t), nn.Parameter):
            self.add((t,), PARAMETER)  # so that aliases without a base are found too
            return PARAMETER
        return self.get(t.untyped_storage())


def is_cast_of_parameter(t: Tensor, owned: ModelStorages) -> bool:
    """Whether t is autocast's copy of a weight (or a view of it), which autocast caches itself.

    Its history is short: at most four nodes with one input lead to the AccumulateGrad of a
    parameter of another dtype.
    """
    node = t.grad_fn
    for _ in range(5):
        if node is None:
            return False
        variable: Tensor | None = getattr(node, "variable", None)
        if variable is not None:
            return variable.dtype != t.dtype and owned.reason(variable, is_param=False) == PARAMETER
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def why_keep(
    t: Tensor, named: SavedName, owned: ModelStorages, mark: str | None, on_gpu: bool
) -> str | None:
    """Why a plain tensor is not moved, or None. A mark "offload" overrides the reasons that come after it.

    on_gpu: the scope has seen CUDA tensors
    """
    owner_kind, nbytes = owned.reason(t, named.is_param), t.untyped_storage().nbytes()
    if owner_kind == PARAMETER:
        return owner_kind
    if mark == marks.KEEP:
        return "marked keep"
    if nbytes == 0:
        return "empty"
    if on_gpu and not t.is_cuda:
        return "on the CPU, in a scope that moves from CUDA"
    if mark == marks.OFFLOAD:
        return None
    if owner_kind is not None:
        return owner_kind
    return CAST if is_cast_of_parameter(t, owned) else None


def effective_mark(t: Tensor, named: SavedName) -> str | None:
    """The mark of a tensor, else that of the modules that save it, where "keep" wins."""
    mark = marks.marked.get(t.untyped_storage()) if marks.marked.entries else None
    if mark is not None:
        return mark
    for module in owners_of(named):
        mark = module.__dict__.get(marks.ATTRIBUTE, mark)
        if mark == marks.KEEP:
            break
    return mark
