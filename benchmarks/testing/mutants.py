"""Mutants against the tests that run their lines: each in a copy of the tree, in a process group of its own."""

import compileall
import contextlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import Row, read_lines
from benchmarks.testing.mutations import PACKAGES, Edit
from benchmarks.testing.suite import Covering, environment, place_plugin, pytest_command

LIMIT_SECONDS = 120.0
CHOSEN_SECONDS = LIMIT_SECONDS / 2  # recorded time of the tests to run; a busier machine takes longer
#: A stopped test counts as hanging if it ran so much longer than when it was recorded, in seconds and as a ratio.
HANGING_SECONDS, HANGING_RATIO = 30.0, 4.0
START_SECONDS = 0.02  # to collect one test


@dataclass(frozen=True, slots=True)
class Verdict:
    """``killed``, ``timeout`` (killed too), ``survived``, or ``uncovered`` where no test runs the line."""

    outcome: str
    test: str | None = None
    tests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest."""

    status: int | None  # None: ended at the limit
    seconds: dict[str, float]  # of the tests that were finished
    failed: str | None  # the first
    quiet: float | None  # seconds from the end of the last phase of a test to the end of the run; None: there was none


def chosen_tests(tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """The first ones whose time adds up to ``CHOSEN_SECONDS``, and one in any case."""
    chosen: list[str] = []
    total = 0.0
    for test in tests:
        total += seconds[test] + START_SECONDS
        if chosen and total > CHOSEN_SECONDS:
            break
        chosen.append(test)
    return chosen


class Copy:
    """A copy of what git tracks in a tree, in which one mutant at a time stands."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root, self.work = folder / "tree", folder / "work"
        place_plugin(self.work)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, self.root / name, follow_symlinks=False)
        for package in PACKAGES.values():  # a mutant may have the size and the time of the text that it replaces
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(self.root / package, quiet=2, force=True, invalidation_mode=mode)
        self.passed: dict[str, bool] = {}

    def pytest(self, options: Sequence[str], limit: float | None, **variables: str) -> Run:
        """Ends the whole process group at the limit, and what is left of it afterwards."""
        durations = self.work / "durations.jsonl"
        durations.unlink(missing_ok=True)
        command = pytest_command("-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--basetemp", str(self.work / "tmp"))
        variables = environment(self.root, self.work) | variables
        with (self.work / "last.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *options], cwd=self.root, env=variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        with contextlib.suppress(OSError):  # a mutant that takes all memory is the one to end; what it starts, too
            Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        stopped = time.time()
        end_others("TESTING_DURATIONS", str(durations))
        return run_of(status, read_lines(durations) if durations.exists() else [], stopped)

    def collect(self) -> None:
        """Leave the tests' bytecode, as it is rewritten by pytest, for the runs to come."""
        self.pytest(["--collect-only", "tests"], None)

    def run(self, tests: Sequence[str], limit: float | None) -> Run:
        arguments = self.work / "tests.txt"
        arguments.write_text("\n".join(tests))
        return self.pytest([f"@{arguments}"], limit, PYTHONDONTWRITEBYTECODE="1")

    def passes(self, test: str) -> bool:
        """Whether a test passes without a mutant, alone."""
        if test not in self.passed:
            self.passed[test] = self.run([test], None).status == 0
        return self.passed[test]


def run_of(status: int | None, lines: Sequence[Row], stopped: float) -> Run:
    """What the plugin wrote of a run: a line for each phase of a test."""
    finished = {line["test"]: 0.0 for line in lines if line["phase"] == "teardown"}
    for line in lines:
        if line["test"] in finished:
            finished[line["test"]] += line["seconds"]
    failed = next((line["test"] for line in lines if line["outcome"] == "failed"), None)
    return Run(status, finished, failed, stopped - lines[-1]["stop"] if lines else None)


def end_others(variable: str, value: str) -> None:
    """End what a test started in a process group of its own and left: it has the variable of the run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value:
                process.kill()


def unfinished(ran: Run, tests: Sequence[str]) -> str | None:
    """The test in which a run ended."""
    return next((test for test in tests if test not in ran.seconds), None)


def hanging_test(ran: Run, tests: Sequence[str], seconds: Mapping[str, float]) -> str | None:
    """The test in which a run was ended, if that is due to the mutant and not to a busy machine."""
    running = unfinished(ran, tests)
    if running is None or ran.quiet is None:
        return None
    return running if ran.quiet > HANGING_SECONDS + HANGING_RATIO * seconds[running] else None


def try_mutant(copy: Copy, edit: Edit, covering: Covering) -> Verdict:
    """Run the tests that cover a mutant until one fails that passes without it."""
    seconds = {name: test.seconds for name, test in covering.tests.items()}
    tests = chosen_tests(covering(edit.path, edit.lines), seconds)
    target = copy.root / edit.path
    original = target.read_bytes()
    began = time.monotonic()
    while tests:
        target.write_bytes(edit.applied(original))
        try:
            ran = copy.run(tests, LIMIT_SECONDS)
        finally:
            target.write_bytes(original)
        took = round(time.monotonic() - began, 1)
        if ran.status == 0:
            return Verdict("survived", None, len(tests), took)
        if ran.status is None:
            hanging = hanging_test(ran, tests, seconds)
            return Verdict("timeout" if hanging else "survived", hanging, len(tests), took)
        failed = ran.failed or (None if ran.quiet is None else unfinished(ran, tests))  # or pytest itself was ended
        if failed is None:
            if copy.run([*tests, "--collect-only"], None).status != 0:
                raise RuntimeError(f"{edit.path}: its tests cannot be collected without the mutant: {copy.work}")
            return Verdict("killed", "collection", len(tests), took)
        if copy.passes(failed):
            return Verdict("killed", failed, len(tests), took)
        print(f"{failed} fails without a mutant", file=sys.stderr)
        tests = [test for test in tests if test != failed]
    return Verdict("uncovered")
