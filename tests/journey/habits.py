"""Habits from DDP and FSDP2."""
