"""Published comparisons of other planners, reproduced by calculation: `python -m bench.papers`."""
