"""Data parallelism: gradient reduction (DDP) and sharded parameters (FSDP2)."""
