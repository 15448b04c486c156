"""torch's wrappers of models (FSDP2, DDP, FSDP1), and the hooks that tagc installs in them."""
