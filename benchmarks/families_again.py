"""Takes the lines of a later run of ``benchmarks.families`` into ``families.jsonl``.

    python -m benchmarks.families_again FILE [--into FILE]

A line takes the place of the one of the same problem and machine. What the later run left out of the families, as far
behind, stays as it was measured before, with the ``commit`` of that.
"""

import argparse
from pathlib import Path

from benchmarks.families import RESULTS_NAME
from benchmarks.families_table import Record, read_results, write_results
from benchmarks.kernels import ROOT


def taken_over(before: Record, later: Record) -> Record:
    """``later`` with the families that only ``before`` has."""
    kept = {
        name: {"commit": before["commit"], **found}
        for name, found in before["families"].items()
        if name not in later["families"]
    }
    refused = {name: why for name, why in later["refused"].items() if name not in kept}
    return later | {"families": kept | later["families"], "refused": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("later", type=Path)
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results" / RESULTS_NAME)
    options = parser.parse_args()
    results = read_results(options.into)
    for key, record in read_results(options.later).items():
        results[key] = taken_over(results[key], record) if key in results else record
    write_results(options.into, results)


if __name__ == "__main__":
    main()
