"""What annexes take from the core beyond what users call: docs/reference/architecture.md says what each name is
for."""

from tagc.torch.exchange.agreement import agree_all
from tagc.torch.exchange.comm import share
from tagc.torch.exchange.gloo import bytes_at
from tagc.torch.exchange.internals import default_store, unwrapped
from tagc.torch.exchange.waits import disconnect, timeout_of, unheard
from tagc.torch.schedule.options import number

__all__ = [
    "agree_all",
    "bytes_at",
    "default_store",
    "disconnect",
    "number",
    "share",
    "timeout_of",
    "unheard",
    "unwrapped",
]
