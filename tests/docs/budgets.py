"""The measured part of docs/measuring.md: what searches with a budget find beside the default's."""

import statistics

from benchmarks.budgets import SEARCHES
from benchmarks.kernels_table import geometric_mean
from tests.docs.pages import DOCS
from tests.docs.results import Record, records

PAGE = DOCS / "measuring.md"


def budgets() -> str:
    """By search: its time over the default's, and how many kernels it timed."""
    lines = records("h100/budgets")
    names = [name for name, options in SEARCHES.items() if options.budget_seconds]
    own = {name: [line for line in lines if line["search"] == name] for name in names}
    return "".join(f"- {name}: {_figures(own[name])}\n" for name in names)


def _figures(lines: list[Record]) -> str:
    ratios, kernels = [line["ratio"] for line in lines], statistics.median(line["measured"] for line in lines)
    return f"{geometric_mean(ratios):.2f} (at most {max(ratios):.2f}; kernels: {kernels:.0f})"


REGIONS = {"budgets": budgets}
