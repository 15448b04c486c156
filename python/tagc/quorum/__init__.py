"""tagc.quorum: under torchft, the ranks of an exchange are the replicas of a quorum, which may change at
each step.

managed      that connection, and DDP; kind.py tells compress() of it
fsdp2        models that are sharded inside each replica
exchanges    Sites, for local steps"""

from tagc.quorum.exchanges import Sites

__all__ = ["Sites"]
