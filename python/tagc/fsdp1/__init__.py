"""tagc.fsdp1: FullyShardedDataParallel for compress(): its wrapper and hooks, and what advise() knows of it.
kind.py tells both of it."""
