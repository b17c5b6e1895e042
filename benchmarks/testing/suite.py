"""A tree's suite under coverage: which tests run which lines, how long each takes, and branches by package.

Every Python process that a test starts is measured too, but not one that is killed, or gets an environment of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage

from benchmarks.harness import Row, read_lines
from benchmarks.testing.mutations import python_files, statements_in

PACKAGES = {
    "lospmm": "lospmm", "lospmm_server": "server/lospmm_server", "lospmm_proxies": "proxies/lospmm_proxies",
    "lospmm_rank": "rank_model/lospmm_rank", "lospmm_datasets": "datasets/lospmm_datasets",
}  # fmt: skip
PLUGIN = "testing_contexts"
QUIET = (
    "no-data-collected, module-not-imported, module-not-measured, already-imported, include-ignored, couldnt-parse, "
    "trace-changed, dynamic-conflict, no-sysmon, no-ctracer"
)  # of processes whose stderr tests read


@dataclass(slots=True)
class Recorded:
    """What a run told of one test."""

    seconds: float = 0.0
    outcomes: set[str] = field(default_factory=set)


def environment(tree: Path, work: Path) -> dict[str, str]:
    """The code of ``tree`` and no other, the plugin in ``work``, the same examples of Hypothesis every time."""
    folders = [tree, *sorted({(tree / folder).parent for folder in PACKAGES.values()} - {tree}), work]
    others = ("COVERAGE_", "PYTEST_XDIST_", "PYTEST_CURRENT_TEST")  # of a run of tests that this is part of
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "CI": "true",
        "TESTING_DURATIONS": str(work / "durations.jsonl"),
    }


def pytest_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, *options]


def place_plugin(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("contexts.py"), work / f"{PLUGIN}.py")


def _settings(tree: Path, work: Path, concurrency: str) -> str:
    included = "\n".join(f"    {tree / folder}/*" for folder in PACKAGES.values())
    return f"""[run]
branch = true
parallel = true
data_file = {work}/data/coverage
context = ${{PYTEST_CURRENT_TEST-}}
concurrency = {concurrency}
patch = _exit
include =
{included}
disable_warnings = {QUIET}
"""


def run_suite(tree: Path, work: Path, options: Sequence[str]) -> None:
    """The tests that need no GPU, as ``make test`` runs them, then those in a browser, whose greenlets are traced."""
    place_plugin(work)
    (work / "data").mkdir(exist_ok=True)
    in_browser = [path for path in sorted((tree / "tests").rglob("test_*.py")) if "playwright" in path.read_text()]
    without = [f"--ignore={path}" for path in in_browser]
    parts = [("thread, multiprocessing", ["-n", "2", "--dist", "worksteal", *without])]
    if in_browser:
        parts.append(("thread, multiprocessing, greenlet", list(map(str, in_browser))))
    for concurrency, chosen in parts:
        settings = work / "coverage.ini"
        settings.write_text(_settings(tree, work, concurrency))
        variables = environment(tree, work) | {"COVERAGE_PROCESS_START": str(settings)}
        command = pytest_command("-m", "not gpu", "--basetemp", str(work / "tmp"), *chosen, *options)
        subprocess.run(command, cwd=tree, env=variables, check=False)  # what failed stands in the durations


def combine(work: Path) -> None:
    """All that processes measured, in one file."""
    joined = coverage.Coverage(data_file=str(work / "coverage"), config_file=False, branch=True)
    joined.combine([str(work / "data")], keep=True)
    joined.save()


def recorded_tests(work: Path) -> dict[str, Recorded]:
    found: defaultdict[str, Recorded] = defaultdict(Recorded)
    for line in read_lines(work / "durations.jsonl"):
        found[line["test"]].seconds += line["seconds"]
        found[line["test"]].outcomes.add(line["outcome"])
    return dict(found)


class Covering:
    """Which tests run which lines."""

    def __init__(self, tree: Path, work: Path) -> None:
        self.tree = tree
        self.data = coverage.CoverageData(str(work / "coverage"))
        self.data.read()
        self.tests = {name: one for name, one in recorded_tests(work).items() if one.outcomes == {"passed"}}
        self.beside: defaultdict[str, set[str]] = defaultdict(set)  # the tests of one file
        for name in self.tests:
            self.beside[name.partition("::")[0]].add(name)

    def __call__(self, path: Path, lines: Sequence[int]) -> list[str]:
        """Quickest first; then those for which another test, or an import, may have run the lines."""
        by_line = self.data.contexts_by_lineno(str(self.tree / path))
        contexts = {context for line in lines for context in by_line.get(line, [])}
        split = [context.rpartition(" (") for context in contexts if context]
        direct = {test for test, _, phase in split if phase == "call)"}
        others = {one for test, _, phase in split if phase != "call)" for one in self.beside[test.partition("::")[0]]}
        if "" in contexts:  # when modules were imported: by whoever uses this one
            users = {context for found in by_line.values() for context in found if context}
            others |= {context.rpartition(" (")[0] for context in users}
        ordered = sorted(self.tests, key=lambda name: self.tests[name].seconds)
        return [name for name in ordered if name in direct] + [name for name in ordered if name in others - direct]


def package_of(path: Path) -> str:
    """The package of the first two floors that holds a module: "lospmm.codegen", "lospmm", "lospmm_server"."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            below = path.relative_to(folder).parts[:-1]
            return ".".join((package, *below[:1])) if package == "lospmm" else package
    raise ValueError(f"{path} is in none of {', '.join(PACKAGES)}")


def packages_in(tree: Path, like: Path) -> dict[Path, str]:
    """The package of each module of ``tree`` in the layout of ``like``: the one that has most of its statements.

    A module none of whose statements are there has the package of its own path, or the one above.
    """
    where: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    known = {path: package_of(path) for path in python_files(like, PACKAGES)}
    for path, package in known.items():
        for statement in statements_in(like / path):
            where[statement].add(package)
    found = {}
    for path in python_files(tree, PACKAGES):
        votes = Counter(
            package for statement in statements_in(tree / path) if len(where[statement]) == 1
            for package in where[statement]
        )  # fmt: skip
        own = package_of(path)
        found[path] = votes.most_common(1)[0][0] if votes else own if own in known.values() else own.partition(".")[0]
    return found


def coverage_by_package(tree: Path, work: Path, packages: Mapping[Path, str]) -> list[Row]:
    """Lines and branches, and how many of them ran, of every module: of one that was never imported, none."""
    measured = coverage.Coverage(data_file=str(work / "coverage"), config_file=False, branch=True)
    measured.load()
    report = work / "report.json"
    measured.json_report(morfs=[str(tree / path) for path in packages], outfile=str(report))
    summaries = {Path(name).resolve(): one["summary"] for name, one in json.loads(report.read_text())["files"].items()}
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, package in packages.items():
        summary = summaries[(tree / path).resolve()]
        for name, key in (("lines", "num_statements"), ("lines_run", "covered_lines"),
                          ("branches", "num_branches"), ("branches_run", "covered_branches")):  # fmt: skip
            sums[package][name] += summary[key]
    return [{"package": package, **sums[package]} for package in sorted(sums)]
