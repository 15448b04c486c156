"""torch's wrappers of models (FSDP2, DDP), and the hooks that tagc installs in them."""
