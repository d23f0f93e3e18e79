"""A dispatch sends tokens to the ranks of their experts, and the sums back.

exchange.py      the interface, and what all ways share: which token goes to which ranks
all_to_all.py    what (a) and (b) share: rows that travel beside other kernels
host_counts.py   (a) `all_to_all_single` with counts that the host reads
fixed.py         (b) `all_to_all_single` in equal splits of a fixed capacity
symmetric.py     (c) written into the memory of the other GPUs of a host
device_counts.py (d) `all_to_all_vdev` over NVSHMEM with counts that the device reads
lost.py          the rank that has ended, named in the errors of those that wait for it
codes.py         quantized tokens as words
bounded.py       the sizes of (b), (c) and (d), overflow.py the flag where they do not suffice
choose.py        which of them, by a vote of all ranks
compiled.py      what torch.compile sees of them
ops.py           the ops of a Sequential over an exchange
"""

from .device_counts import DeviceCounts as DeviceCounts
from .exchange import Arrived as Arrived
from .exchange import Exchange as Exchange
from .fixed import FixedCapacity as FixedCapacity
from .host_counts import HostCounts as HostCounts
from .ops import ExpertArrive as ExpertArrive
from .ops import ExpertCollect as ExpertCollect
from .ops import ExpertDispatch as ExpertDispatch
from .overflow import check_overflow as check_overflow
from .symmetric import PeerMemory as PeerMemory
