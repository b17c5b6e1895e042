"""How strong a tree's tests are: branches by package, and how many of a sample of mutants they kill.

    python -m benchmarks.testing coverage --tree DIR --work DIR [--like DIR] [--recorded] [-- OPTIONS OF PYTEST]
    python -m benchmarks.testing mutants --tree DIR --work DIR [--jobs 1] [--seconds N]
    python -m benchmarks.testing table

``--tree`` is a checkout, whose commit names its lines in ``--out``; ``--like`` one in whose layout packages are
counted. ``--work`` keeps what was measured, for ``mutants``, which goes on where it was ended; ``--out`` names them
(``git show e94cf6a:benchmarks/testing/sample.py`` drew them). ``table`` compares the first commit with each other.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from queue import SimpleQueue

from benchmarks.harness import Row, read_results, write_results
from benchmarks.testing import table
from benchmarks.testing.mutants import Copy, Verdict, try_mutant
from benchmarks.testing.mutations import Edit, Name, find, named_mutants
from benchmarks.testing.suite import Covering, combine, coverage_by_package, packages_in, recorded_tests, run_suite

Results = dict[tuple[str, ...], Row]


def key_of(row: Row) -> tuple[str, ...]:
    return row["what"], row.get("commit", ""), str(row.get("package", "")), str(row.get("mutant", ""))


def load(out: Path) -> Results:
    return read_results(out, key_of)


def add(out: Path, rows: list[Row]) -> None:
    results = load(out)
    results.update({key_of(row): row for row in rows})
    write_results(out, results)


def commit_of(tree: Path) -> str:
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.strip()


def measure(arguments: argparse.Namespace) -> None:
    tree, work, commit = arguments.tree, arguments.work, commit_of(arguments.tree)
    if not arguments.recorded:
        run_suite(tree, work, arguments.options)
    combine(work)
    tests = recorded_tests(work)
    suite = {
        "what": "suite", "commit": commit, "tests": len(tests),
        "failed": sorted(name for name, test in tests.items() if "failed" in test.outcomes),
        "skipped": sum("skipped" in test.outcomes for test in tests.values()),
        "seconds": round(sum(test.seconds for test in tests.values())),
    }  # fmt: skip
    rows = coverage_by_package(tree, work, packages_in(tree, arguments.like or tree))
    add(arguments.out, [suite, *({"what": "coverage", "commit": commit, **row} for row in rows)])


def try_all(arguments: argparse.Namespace, named: dict[int, Edit], told: Callable[[int, Verdict], None]) -> None:
    """Several at once, each in a copy; none begins after ``--seconds``."""
    until = time.monotonic() + arguments.seconds
    covering = Covering(arguments.tree, arguments.work)
    copies: SimpleQueue[Copy] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for i in range(arguments.jobs):
            copy = Copy(arguments.tree, Path(folder) / str(i))
            copy.collect()
            copies.put(copy)

        def one(item: tuple[int, Edit]) -> tuple[int, Verdict | None]:
            if time.monotonic() > until:
                return item[0], None
            copy = copies.get()
            try:
                return item[0], try_mutant(copy, item[1], covering)
            finally:
                copies.put(copy)

        for number, outcome in pool.map(one, named.items()):
            if outcome:
                told(number, outcome)


def mutants(arguments: argparse.Namespace) -> None:
    commit, results = commit_of(arguments.tree), load(arguments.out)
    done = {row["mutant"] for row in results.values() if row["what"] == "mutant" and row["commit"] == commit}
    wanted = {row["mutant"]: Name(**{field.name: row[field.name] for field in fields(Name)})
              for row in results.values() if row["what"] == "sample"}  # fmt: skip
    edits = named_mutants(arguments.tree)

    def told(number: int, outcome: Verdict) -> None:
        add(arguments.out, [{"what": "mutant", "commit": commit, "mutant": number, **asdict(outcome)}])
        print(number, outcome, flush=True)

    found = {number: find(name, edits) for number, name in wanted.items() if number not in done}
    for number, edit in found.items():
        if edit is None:
            told(number, Verdict("absent"))
    try_all(arguments, {number: edit for number, edit in found.items() if edit}, told)


def show(arguments: argparse.Namespace) -> None:
    print(table.tables(list(load(arguments.out).values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("coverage", measure), ("mutants", mutants), ("table", show)):
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        command.add_argument("--out", type=Path, default=Path("benchmarks/results/testing.jsonl"))
        if name != "table":
            command.add_argument("--tree", type=lambda text: Path(text).resolve(), required=True)
        if name in ("coverage", "mutants"):
            command.add_argument("--work", type=lambda text: Path(text).resolve(), required=True)
        if name == "coverage":
            command.add_argument("--like", type=lambda text: Path(text).resolve())
            command.add_argument("--recorded", action="store_true", help="the suite was run; report what --work has")
            command.add_argument("options", nargs="*", help="for pytest, after --")
        if name == "mutants":
            command.add_argument("--jobs", type=int, default=1)
            command.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after this time")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
