"""Passes: Graph -> Graph, each valid in, valid out; their order is in ir/passes/normalise.py."""
