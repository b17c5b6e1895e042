"""The tables of docs/operations.md: what the service withstands (benchmarks/results/service.jsonl), and how much sooner
several GPUs are (ray_scaling.jsonl)."""

import statistics

from tests.docs.pages import DOCS
from tests.docs.results import Record, Row, records, table

PAGE = DOCS / "operations.md"


def _of(part: str) -> list[Record]:
    return [record for record in records("service") if record["measure"] == part]


def _fuzz(found: Record) -> Row:
    return (
        f"schemathesis, {found['requests']:,} requests to {found['tested']} of {found['operations']} operations",
        f"{found['failures']} unexpected answers",
    )


def _hostile(found: Record) -> Row:
    if "files" in found:
        worst, peak = max(found["peaks_megabytes"].items(), key=lambda item: item[1])
        return (
            f"{found['files']} kinds of files of up to {found['file_megabytes']} MiB, {found['at_once']} of a kind at "
            f"once, in {found['seconds']:.0f} s",
            f"{', '.join(f'{count} x {status}' for status, count in found['statuses'].items())}. Memory at most {peak} "
            f"MB (of {worst})",
        )
    statuses = found["statuses"]
    left = statuses.get("0", 0)
    refused = ", ".join(f"{count:,} x {status}" for status, count in statuses.items() if status != "0")
    return (
        f"{found['uploads']:,} hostile uploads of {len(found['families'])} kinds in {found['seconds']:.0f} s",
        f"{refused}; {left:,} clients left first. Memory at most {found['peak_megabytes']} MB",
    )


def _crowd(found: Record) -> Row:
    return (
        f"{found['clients']} clients at once, {found['matrices']} matrices",
        f"{found['tuned']} tunings, {found['right_answers']} right answers, the last after "
        f"{found['longest_wait_seconds']:.1f} s",
    )


def _chaos(found: Record) -> Row:
    killed = ", ".join(f"{count} x {kind}" for kind, count in sorted(found["kills"].items()))
    return (
        f"{sum(found['kills'].values())} kills during {found['layers']} layers, {found['database']}",
        f"{found['artifacts_verified']} verified kernels, {found['succeeded_events']} tunings to the end "
        f"({killed}; {found['kills_while_it_had_a_job']} had a job; {found['attempts']} attempts, at most "
        f"{found['most_attempts']} of a job)",
    )


def withstood() -> str:
    rows = [make(found) for part, make in _ROWS.items() for found in _of(part)]
    return table(("what", "outcome"), rows)


_ROWS = {"fuzz": _fuzz, "hostile": _hostile, "crowd": _crowd, "chaos": _chaos}


def rates() -> str:
    """A line for each kind of run: its repeats from the best to the worst 99th percentile."""
    lines = []
    for found in _of("rate"):
        runs = sorted(found["runs"], key=lambda run: float(run["p99_ms"]))
        asked = "as often as can be" if found["due_per_second"] is None else f"{found['due_per_second']:,} a second"
        answered = sorted(run["requests_per_second"] for run in runs)
        loads = sorted(run["load_before"] for run in runs)
        lines.append(
            (
                asked,
                f"{answered[0]:,} to {answered[-1]:,}",
                f"{found['middle']['p50_ms']:.1f}",
                ", ".join(f"{run['p99_ms']:.1f}" for run in runs),
                f"{max(run['longest_ms'] for run in runs):.0f}",
                f"{loads[0]:.1f} to {loads[-1]:.1f}",
            )
        )
    titles = ("asked for", "answered a second", "median, ms", "99th percentile of each run, ms", "longest, ms", "load")
    return table(titles, lines, right=5)


def scaling() -> str:
    """A line for each number of GPUs."""
    lines = [
        (
            f"{found['slots']}",
            f"{found['seconds']:.1f}",
            f"{statistics.mean(found['layer_seconds']):.1f}",
            f"{found['speedup']:.2f}",
            f"{found['efficiency']:.2f}",
        )
        for found in records("ray_scaling")
    ]
    return table(("GPUs", "all layers, s", "a layer, s", "speed-up", "efficiency"), lines, right=5)


REGIONS = {"withstood": withstood, "rates": rates, "scaling": scaling}
