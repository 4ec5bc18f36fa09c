"""Published comparisons of other planners, beside the same ones by calculation, with every setting stated.

    python -m bench.papers [--rows '^Whale'] [--resume]

No device is used: what is published was measured by others, what is ours is what the cost model predicts of the plans
found. What a paper's settings were is often not known: then a range of them is calculated, and none is picked out.
Every row is saved as soon as it is done.
"""

import sys

from bench.papers import PAPERS, TABLES
from bench.report import add
from bench.rows import parser, selected


def main(arguments: list[str] | None = None) -> None:
    """Run the rows that are asked for, saying which."""
    settings = parser(__doc__).parse_args(arguments)
    wanted = selected([paper.tables[0] for paper in PAPERS], settings, "papers")
    for paper in PAPERS:
        for name in wanted[paper.tables[0].title]:
            print(name, file=sys.stderr, flush=True)
            add("papers", TABLES, paper.cases[name](), {})
    print("written to bench/results/papers.md and papers.json")


if __name__ == "__main__":
    main()
