"""``benchmarks.counters``: what it reads of a profiler's table."""

from benchmarks.counters import METRICS, counted

LAUNCHES = 2


def test_what_a_profiler_says_is_read_by_name() -> None:
    names = [*METRICS.values()][::-1]
    lines = [
        ",".join(f'"{one}"' for one in ("ID", "Kernel Name", *names)),
        ",".join('""' for _ in range(len(names) + 2)),
    ]
    lines += [
        ",".join((f'"{launch}"', '"a kernel, (4, 1)"', *(f'"{launch},{at:03}.5"' for at in range(len(names)))))
        for launch in range(1, LAUNCHES + 1)
    ]
    found = counted("\n".join(("==PROF== Connected", "", *lines)))
    assert len(found) == LAUNCHES
    for launch, row in enumerate(found, start=1):
        assert [*row] == [*METRICS]
        assert [*row.values()][::-1] == [1000 * launch + at + 0.5 for at in range(len(names))]
