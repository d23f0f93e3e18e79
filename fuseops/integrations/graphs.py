"""CUDA graphs of Sequentials that read side inputs.

A Sequential needs no adapter under `torch.cuda.graph`: write new values into the captured tensors (`x`, `offs`,
`probs`) and replay. Group sizes may change between replays, up to the captured number of rows: rows beyond `offs[-1]`
are padding. `torch.cuda.make_graphed_callables` passes tensors by position only, so it takes a `Positional`:

    graphed = torch.cuda.make_graphed_callables(Positional(experts, "offs", "probs"), (x, offs, probs))
    y = graphed(x, offs, probs)

Capture after a few steps on a side stream, as torch's documentation says: the first step compiles kernels. Leave
`delay_wgrad` off: the graph of the backward does not contain `backward_dw`. `main_grad` buffers keep their address.
"""

from typing import Any

from torch import Tensor, nn

from fuseops.arguments import instance_of, several
from fuseops.errors import SideInputError


class Positional(nn.Module):
    """A `Positional` takes the side inputs of a Sequential or op by position: `forward(x, *sides)`, in order of names.

    names: all side inputs that the module reads.  returns: side outputs to return after y.
    Raises FuseOpsError for arguments of another type, and SideInputError when the number of tensors differs from that
    of the names.
    """

    def __init__(self, module: nn.Module, *names: str, returns: tuple[str, ...] = ()) -> None:
        super().__init__()
        instance_of(module, nn.Module, "Positional(module, ...)", "a Sequential or an op")
        several(names, str, "Positional(module, *names)", "names of side inputs")
        returns = several(
            returns, str, "Positional(returns=...)", "names of side outputs, in a tuple"
        )
        self.module, self.names, self.returns = module, names, returns

    def forward(self, x: Tensor, *sides: Tensor) -> Any:
        if len(sides) != len(self.names):
            raise SideInputError(
                f"Positional takes x and {list(self.names)}, in that order; got x and {len(sides)} tensors."
            )
        options = {"returns": self.returns} if self.returns else {}
        return self.module(x, **dict(zip(self.names, sides, strict=True)), **options)
