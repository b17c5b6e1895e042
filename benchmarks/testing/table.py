"""The tables of ``testing.jsonl``: a commit per column, and what the first has that another lost."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.harness import Row

KILLED = ("killed", "timeout")
LOST_POINTS = 1.0  # of coverage, in any package


def percent(row: Row, what: str) -> float:
    return 100 * row[f"{what}_run"] / row[what] if row[what] else 100.0


def commits_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["commit"] for row in rows if "commit" in row))


def _lines(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *body)]


def coverage_table(rows: Sequence[Row]) -> list[str]:
    """Percent of branches, and of lines, by package and commit."""
    found = {(row["package"], row["commit"]): row for row in rows if row["what"] == "coverage"}
    commits = [commit for commit in commits_of(rows) if any(one == commit for _, one in found)]
    body = []
    for package in sorted({package for package, _ in found}):
        cells = [package]
        for commit in commits:
            row = found.get((package, commit))
            cells += [f"{percent(row, 'branches'):.1f}", str(row["branches"]), f"{percent(row, 'lines'):.1f}"] if row \
                else ["", "", ""]  # fmt: skip
        body.append(cells)
    header = ["package"]
    for commit in commits:
        header += [f"{commit}: branches %", "of", "lines %"]
    return _lines(header, body)


def mutant_table(rows: Sequence[Row]) -> list[str]:
    """Mutants killed by package and commit, of those that were tried."""
    packages = {row["mutant"]: row["package"] for row in rows if row["what"] == "sample"}
    tried = [row for row in rows if row["what"] == "mutant" and row["outcome"] != "absent"]
    commits = commits_of(tried)
    counts: Counter[tuple[str, str]] = Counter()
    killed: Counter[tuple[str, str]] = Counter()
    for row in tried:
        for package in (packages[row["mutant"]], "all"):
            counts[package, row["commit"]] += 1
            killed[package, row["commit"]] += row["outcome"] in KILLED
    body = [
        [package, *(f"{killed[package, commit]} of {counts[package, commit]}" for commit in commits)]
        for package in (*sorted(set(packages.values())), "all")
    ]
    return _lines(["killed", *commits], body)


def weaker(rows: Sequence[Row]) -> list[str]:
    """What each later commit lost against the first: points of coverage by package, and mutants."""
    commits = commits_of(rows)
    covered = {(row["commit"], row["package"]): percent(row, "branches") for row in rows if row["what"] == "coverage"}
    tried = [row for row in rows if row["what"] == "mutant" and row["outcome"] != "absent"]
    outcomes = {(row["commit"], row["mutant"]): row["outcome"] in KILLED for row in tried}
    found = []
    for commit in commits[1:]:
        for (one, package), share in covered.items():
            now = covered.get((commit, package), 0.0)
            if one == commits[0] and now < share - LOST_POINTS:
                found.append(f"{commit}: branches of {package}: {now:.1f} %, {share:.1f} % at {commits[0]}")
        both = [number for one, number in outcomes if one == commit and (commits[0], number) in outcomes]
        before, now = (sum(outcomes[one, number] for number in both) for one in (commits[0], commit))
        if now < before:
            found.append(f"{commit}: kills {now} of {len(both)} mutants, {before} at {commits[0]}")
        if lost := [str(number) for number in both if outcomes[commits[0], number] and not outcomes[commit, number]]:
            found.append(f"{commit}: no longer killed: {', '.join(lost)}")
    return found


def tables(rows: Sequence[Row]) -> str:
    parts = coverage_table(rows), mutant_table(rows), weaker(rows)
    return "\n\n".join("\n".join(part) for part in parts if part)
