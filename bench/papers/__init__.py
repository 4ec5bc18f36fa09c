"""Published comparisons of other planners, reproduced by calculation: `python -m bench.papers`."""

from bench.papers.alpa import ALPA
from bench.papers.alpa_moe import ALPA_MOE
from bench.papers.autoddl import AUTODDL
from bench.papers.tap import TAP
from bench.papers.whale import WHALE

PAPERS = (ALPA, ALPA_MOE, AUTODDL, TAP, WHALE)
TABLES = tuple(table for paper in PAPERS for table in paper.described)
