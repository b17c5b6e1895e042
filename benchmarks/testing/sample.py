"""A sample of mutants that stand in two trees, spread over packages, kinds and functions."""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.testing.mutations import Name, named_mutants
from benchmarks.testing.suite import package_of


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of ``count`` each package gets: by the square root of its mutants, so that small ones are seen too."""
    weights = {package: math.sqrt(size) for package, size in sizes.items()}
    total = sum(weights.values())
    exact = {package: count * weight / total for package, weight in weights.items()}
    found = {package: int(share) for package, share in exact.items()}
    by_remainder = sorted(exact, key=lambda package: found[package] - exact[package])
    for package in by_remainder[: count - sum(found.values())]:
        found[package] += 1
    return found


def spread(names: Iterable[Name], count: int, drawn: random.Random) -> list[Name]:
    """At most ``count``: one kind of mutation after the other, no function twice."""
    by_kind: defaultdict[str, list[Name]] = defaultdict(list)
    for name in names:
        by_kind[name.kind].append(name)
    kinds = sorted(by_kind)
    drawn.shuffle(kinds)
    for kind in kinds:
        by_kind[kind].sort(key=lambda name: (name.function, name.statement, name.before, name.after, name.ordinal))
        drawn.shuffle(by_kind[kind])
    chosen: dict[str, Name] = {}
    while len(chosen) < count and any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind]:
                name = by_kind[kind].pop()
                if name.function not in chosen:
                    chosen[name.function] = name
                    break
    return list(chosen.values())[:count]


def draw(tree: Path, like: Path, count: int, seed: int) -> list[tuple[str, Name]]:
    """Mutants of both trees, each with its package in the layout of ``like``."""
    here, there = named_mutants(tree), named_mutants(like)
    by_package: defaultdict[str, list[Name]] = defaultdict(list)
    for name, edit in there.items():
        if name in here:
            by_package[package_of(edit.path)].append(name)
    drawn = random.Random(seed)
    wanted = shares({package: len(by_package[package]) for package in sorted(by_package)}, count)
    found = [(package, name) for package in wanted for name in spread(by_package[package], wanted[package], drawn)]
    drawn.shuffle(found)  # the first few are a sample too
    return found
