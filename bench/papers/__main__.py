"""Published comparisons of other planners, reproduced by calculation, with every setting stated.

    python -m bench.papers [--only autoddl|tap|whale|alpa]

No device is used: what is published was measured by others, what is ours is what the cost model says of the plans found. Each section is
written into bench/results/papers.md and papers.json as soon as it is done; one run alone leaves the others as they are.
"""

import argparse
from collections.abc import Callable, Mapping

from rich.console import Console

from bench.papers.alpa import alpa
from bench.papers.autoddl import autoddl
from bench.papers.section import Section, save, to_markdown
from bench.papers.tap import tap
from bench.papers.whale import whale

SECTIONS: Mapping[str, Callable[[Callable[[str], None]], Section]] = {"autoddl": autoddl, "tap": tap, "whale": whale, "alpa": alpa}


def main() -> None:
    """Run the sections, saying what is being planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="this section alone")
    only = parser.parse_args().only
    with Console(stderr=True).status("") as status:
        for name, run in SECTIONS.items():
            if only in (None, name):
                section = run(lambda doing, name=name: status.update(f"{name}: {doing}"))
                save(section)
                print(to_markdown(section), flush=True)
    print("written to bench/results/papers.md and papers.json")


if __name__ == "__main__":
    main()
