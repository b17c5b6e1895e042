"""A plugin of pytest: measures what each test runs under the test's name, and writes how long each test took.

Contexts are written as PYTEST_CURRENT_TEST is, "test (phase)", so that subprocesses of a test have the same ones.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest


def _measured(item: pytest.Item, phase: str) -> Iterator[None]:
    if measurement := coverage.Coverage.current():
        measurement.switch_context(f"{item.nodeid} ({phase})")
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _measured(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _measured(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from _measured(item, "teardown"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line per phase of a test; where xdist distributes tests, only its controller writes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome,
                "seconds": report.duration, "stop": report.stop}  # fmt: skip
        with Path(os.environ["TESTING_DURATIONS"]).open("a") as file:
            print(json.dumps(line), file=file)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Save now: a worker of xdist may end without its exit handlers."""
    if measurement := coverage.Coverage.current():
        measurement.stop()
        measurement.save()
