"""Dispatchers send tokens to the ranks of their experts, and partial sums back. There are four.

dispatcher.py    the interface, and common parts: which token goes to which ranks
all_to_all.py    the base of (a) and (b), whose rows travel while other kernels run
host_counts.py   (a) `all_to_all_single` with counts that the host reads
fixed.py         (b) `all_to_all_single` in equal splits of a fixed capacity
symmetric.py     (c) kernels that write into the memory of the other GPUs of a host
device_counts.py (d) `all_to_all_vdev` over NVSHMEM with counts that the device reads
bounded.py       the base of (b), (c) and (d): buffer sizes; overflow.py, their overflow flag
choose.py        the choice of a dispatcher, by a vote of all ranks
codes.py         rows of quantized tokens, packed to be sent
compiled.py      custom ops for torch.compile
lost.py          names ranks that have ended in the errors of those that wait for them
ops.py           the ops of a Sequential that send by a dispatcher
"""

from .device_counts import DeviceCounts as DeviceCounts
from .dispatcher import Dispatcher as Dispatcher
from .dispatcher import ReceivedTokens as ReceivedTokens
from .fixed import FixedCapacity as FixedCapacity
from .host_counts import HostCounts as HostCounts
from .ops import ExpertArrive as ExpertArrive
from .ops import ExpertCollect as ExpertCollect
from .ops import ExpertDispatch as ExpertDispatch
from .overflow import check_overflow as check_overflow
from .symmetric import PeerMemory as PeerMemory
