"""What was measured: kept, given back once each, and never under other conditions than those it was made in."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import lospmm
from lospmm.errors import ToolchainFault
from lospmm.families import FAMILIES
from lospmm.families.candidate import Candidate, unrolled
from lospmm.gpu.messages import CacheState, Measurement
from lospmm.gpu.timing import BRIEF, FULL, Effort, Timing
from lospmm.problem.device import DEVICES, Clocks
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm.store import Store
from lospmm.tuning import history as timings
from lospmm.tuning.history import TIMINGS, Conditions, History, conditions_of, decisive_files, key_of, named
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 500, DEVICES["h200"])
CANDIDATES = [
    unrolled(UnrolledPlan(TileSize(rows, 32), Schedule(4), natural_order(PROBLEM.matrix, rows))) for rows in (8, 3, 24)
]
FIRST = CANDIDATES[0]
CLOCKS = Clocks(1980, 3201, 47, ("power cap",))
GOOD = Measurement(Timing(24.123456789012345, 0.0123, 5), 3.17e-07, None, CLOCKS)
WRONG = Measurement(None, float("inf"), "rows not written in every column: 1, 3")
HUNG = Measurement(None, None, "no answer within 30 s", is_lost=True)

PACKAGE = Path(lospmm.__file__).parent

#: What ``lospmm.tuning.build`` imports, or is timed through, without deciding the code of a kernel or its time.
HARMLESS = {"errors", "settings", "store", "version", "matrix", "tuning"}


def conditions(problem: Problem = PROBLEM, cache_state: CacheState = "cold") -> Conditions:
    made_on = {"gpu": "ab" * 16, "driver": "580.159.04", "compiler": "ptxas 13.0.88"}
    return conditions_of(problem, "sass", **made_on, cache_state=cache_state)


def opened(store: Store, **changed: str | int) -> History:
    return History(store, {**conditions(), **changed})


def added(store: Store, candidate: Candidate, effort: Effort, measurement: Measurement) -> None:
    known = opened(store)
    known.add(candidate, effort, measurement)
    known.save()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_each_is_given_back_once_as_it_was(store: Store) -> None:
    first = opened(store)
    assert first.take(FIRST, BRIEF) is None
    first.add(FIRST, BRIEF, GOOD)
    first.add(FIRST, BRIEF, replace(GOOD, timing=Timing(25.0, 0.01, 5)))
    first.add(CANDIDATES[1], BRIEF, WRONG)
    first.save()
    second = opened(store)
    assert second.take(FIRST, BRIEF) == GOOD
    again = second.take(FIRST, BRIEF)
    assert again is not None and again.timing == Timing(25.0, 0.01, 5)
    assert second.take(FIRST, BRIEF) is None
    assert second.take(CANDIDATES[2], BRIEF) is None


def test_a_brief_one_does_not_stand_for_a_full_one(store: Store) -> None:
    added(store, FIRST, BRIEF, GOOD)
    assert opened(store).take(FIRST, FULL) is None
    added(store, FIRST, FULL, replace(GOOD, timing=Timing(23.0, 0.01, 15)))
    known = opened(store)
    whole, brief = known.take(FIRST, FULL), known.take(FIRST, BRIEF)
    assert whole is not None and brief is not None and whole.timing is not None
    assert (whole.timing.micros, brief) == (23.0, GOOD)


def test_what_failed_is_not_run_again_and_what_was_lost_is_once(store: Store) -> None:
    added(store, FIRST, BRIEF, WRONG)
    known = opened(store)
    assert known.take(FIRST, FULL) == WRONG == known.take(FIRST, FULL)
    lost = CANDIDATES[1]
    added(store, lost, BRIEF, HUNG)
    assert opened(store).take(lost, BRIEF) is None
    added(store, lost, BRIEF, HUNG)
    assert opened(store).take(lost, BRIEF) == HUNG
    recovered = CANDIDATES[2]
    added(store, recovered, BRIEF, HUNG)
    added(store, recovered, BRIEF, GOOD)
    assert opened(store).take(recovered, BRIEF) == GOOD


@pytest.mark.parametrize("field", sorted(conditions().keys() - {"n"}))
def test_nothing_is_known_under_other_conditions(store: Store, field: str) -> None:
    added(store, FIRST, BRIEF, GOOD)
    assert opened(store, **{field: "another"}).take(FIRST, BRIEF) is None
    assert opened(store, n=501).take(FIRST, BRIEF) is None
    assert opened(store).take(FIRST, BRIEF) == GOOD


def test_a_layer_is_known_apart_from_its_product() -> None:
    layer = replace(PROBLEM, epilogue=Epilogue(relu=True))
    assert key_of(conditions()) != key_of(conditions(layer))


def test_a_state_of_the_cache_is_known_apart() -> None:
    keys = {key_of(conditions(cache_state=one)) for one in get_args(CacheState)}
    assert len(keys) == len(get_args(CacheState)) == 4
    assert key_of(conditions()) in keys


def test_candidates_differ_in_every_axis_and_in_their_tiling() -> None:
    others = [Schedule(4, column_group=2), Schedule(4, split_k=2)]
    schedules = [Schedule(4), Schedule(8), *others]
    both = (natural_order(PROBLEM.matrix, 8), regroup(PROBLEM.matrix, [8])[8])
    plans = [UnrolledPlan(TileSize(8, cols), one, tiling) for cols in (32, 64) for one in schedules for tiling in both]
    made = [unrolled(plan) for plan in plans]
    made += [Candidate(name, plan, 1.0) for name in ("csr", "group_coo") for plan in FAMILIES[name].plans(PROBLEM)]
    assert len({json.dumps(named(candidate)) for candidate in made}) == len(made)
    assert named(made[0]) == named(unrolled(replace(plans[0], tiling=natural_order(PROBLEM.matrix, 8))))


def test_damage_is_told_and_never_read(store: Store) -> None:
    added(store, FIRST, BRIEF, GOOD)
    assert store.verify() == []
    path = store.directory(TIMINGS, key_of(conditions())) / timings.LINES_FILE
    path.write_bytes(path.read_bytes().replace(b"24.12", b"14.12"))
    assert [entry.key for entry in store.verify()] == [key_of(conditions())]
    assert opened(store).take(FIRST, BRIEF) is None
    added(store, FIRST, BRIEF, GOOD)
    assert opened(store).take(FIRST, BRIEF) == GOOD


def test_entries_are_listed_and_pruned_like_others(store: Store) -> None:
    known = opened(store)
    known.add(FIRST, BRIEF, GOOD)
    known.save()
    (entry,) = store.entries()
    assert entry.kind == TIMINGS and store.prune(max_bytes=0) == [entry] and list(store.entries()) == []
    known.add(CANDIDATES[1], BRIEF, GOOD)  # by a tuning that goes on meanwhile
    known.save()
    assert opened(store).take(FIRST, BRIEF) == GOOD


def test_a_writer_that_is_killed_costs_a_second_at_most(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own."""
    seconds = [0.0]
    monkeypatch.setattr(timings.time, "monotonic", lambda: seconds[0])
    known = opened(store)
    for candidate in CANDIDATES:
        seconds[0] += 0.6
        known.add(candidate, BRIEF, GOOD)
    found = opened(store)
    assert [found.take(candidate, BRIEF) for candidate in CANDIDATES] == [GOOD, GOOD, None]


def test_a_disk_that_fails_is_named(store: Store) -> None:
    store.root.write_text("no folder")
    with pytest.raises(ToolchainFault, match=r"the store in .* cannot be used: Not a directory"):
        added(store, FIRST, BRIEF, GOOD)


def imported(module: str) -> set[str]:
    """What a module of the package imports from it, anywhere in its text."""
    path = PACKAGE.parent / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("lospmm"):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("lospmm")}
    root = PACKAGE.parent
    return {
        name
        for name in found
        if (root / Path(*name.split("."))).with_suffix(".py").exists() or (root / Path(*name.split("."))).is_dir()
    }


def test_all_that_writes_code_is_part_of_the_key() -> None:
    """Whatever a kernel's code may come from is digested, so that a changed emitter never serves an old time."""
    seen: set[str] = set()
    left = {"lospmm.tuning.build"}
    while left:
        module = left.pop()
        seen.add(module)
        left |= {name for name in imported(module) - seen if name.split(".")[1] not in HARMLESS}
    digested = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in decisive_files(PACKAGE)
        if path.suffix == ".py"
    }
    seen.remove("lospmm.tuning.build")
    assert seen <= digested, f"decide the code, or are harmless: {sorted(seen - digested)}"
    assert {"lospmm.codegen.sass.emit", "lospmm.codegen.sass.scheduler", "lospmm.codegen.schedule"} <= digested
    assert {"gpu/timing.py", "gpu/gate.cu"} <= {str(path.relative_to(PACKAGE)) for path in decisive_files(PACKAGE)}


def test_another_text_of_an_emitter_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in decisive_files(PACKAGE):
        copy = tmp_path / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    before = timings.sources_digest()
    monkeypatch.setattr(timings, "__file__", str(tmp_path / "tuning" / "history.py"))
    assert timings.sources_digest.__wrapped__() == before
    scheduler = tmp_path / "codegen" / "sass" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("\n", "\n\n", 1))
    assert timings.sources_digest.__wrapped__() != before
