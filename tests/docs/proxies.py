"""The measured part of docs/proxies.md: how proxies order kernels on an H100, and what searches by them find."""

from benchmarks.paper.emitters import LANGUAGES
from benchmarks.proxies_on_gpu import COLUMNS, mean, rows_of
from tests.docs.pages import DOCS
from tests.docs.results import records, table

PAGE = DOCS / "proxies.md"


def on_h100() -> str:
    """Return a line for each language: means over its problems, and ranges in parentheses."""
    lines = []
    for emitter, rows in rows_of(records("h100/proxies_on_gpu"), records("h100/proxy_searches")).items():
        columns = dict(zip(COLUMNS, zip(*rows.values(), strict=True), strict=True))
        ranks = [one for one in columns["spearman"] if one == one]
        ratios = [found / usual for usual, found in zip(columns["us"], columns["by proxies"], strict=True)]
        means = {name: mean(column) for name, column in columns.items()}
        lines.append(
            (
                f"{LANGUAGES[emitter]}, {len(ratios)} searches",
                f"{means['spearman']:.2f} ({min(ranks):.2f} to {max(ranks):.2f})",
                f"{means['core s']:.2f}, {means['proxy s']:.2f}",
                f"{means['us']:.2f}, {means['by proxies']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            )
        )
    heads = ("language", "rank correlation", "core s: kernel, proxy", "us by kernels, proxies (ratio)")
    return table(heads, lines, right=3)


REGIONS = {"proxies h100": on_h100}
