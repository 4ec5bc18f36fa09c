"""Passes: functions from a valid Graph to a valid Graph; ir/passes/normalise.py has their order."""
