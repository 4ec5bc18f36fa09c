"""Checkpoints and state dicts."""
