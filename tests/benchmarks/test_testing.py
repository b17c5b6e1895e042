"""benchmarks/testing: mutations stand where their names say, and a small tree's tests kill what they should."""

import ast
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.testing import mutants, suite, table
from benchmarks.testing.mutants import Copy, Run, Verdict, chosen_tests, hanging_test, run_of, try_mutant, unfinished
from benchmarks.testing.mutations import Edit, Name, find, named_mutants
from benchmarks.testing.suite import Covering, Recorded, package_of, packages_in

MODULE = '''
def clamp(value: int, *, most: int = 9) -> int:
    """The value, or the most."""
    if value < 0 and not most == 3:
        raise ValueError(f"{value} is negative")
    return min(value, most) if most else 0


def unused(a: int) -> int:
    return a * 2
'''
TESTS = """
from lospmm.clamping import clamp

def test_most() -> None:
    assert clamp(5, most=3) == 3

def test_default() -> None:
    assert clamp(20) == 9

def test_nothing() -> None:
    clamp(1)
"""
SLOW, QUICK, BLIND = (f"tests/test_clamp.py::test_{name}" for name in ("most", "default", "nothing"))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one module and one file of tests, for which pytest starts quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "repository"
    files = {"lospmm/__init__.py": "", "lospmm/clamping.py": MODULE, "tests/test_clamp.py": TESTS, "pytest.ini": ""}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def edit_of(tree: Path, kind: str, before: str, after: str) -> Edit:
    found = named_mutants(tree)
    (name,) = [one for one in found if (one.kind, one.before, one.after) == (kind, before, after)]
    return found[name]


def mutated(tree: Path, name: Name) -> str:
    edit = named_mutants(tree)[name]
    return edit.applied((tree / edit.path).read_bytes()).decode()


@pytest.mark.parametrize(
    ("kind", "before", "after", "line"),
    [
        ("comparison", "value < 0", "value <= 0", "    if (value <= 0) and not most == 3:"),
        ("and/or", "value < 0 and (not most == 3)", "value < 0 or not most == 3",
         "    if (value < 0 or not most == 3):"),
        ("not", "not most == 3", "most == 3", "    if value < 0 and (most == 3):"),
        ("constant", "3", "4", "    if value < 0 and not most == (4):"),
        ("default", "9", "8", "def clamp(value: int, *, most: int = (8)) -> int:"),
        ("raise", "raise ValueError('...')", "pass", "        pass"),
        ("return", "return a * 2", "return None", "    return None"),
        ("operator", "a * 2", "a + 2", "    return (a + 2)"),
        ("condition", "min(value, most) if most else 0", "min(value, most) if not most else 0",
         "    return (min(value, most) if not most else 0)"),
    ],
)  # fmt: skip
def test_a_mutation_stands_where_its_name_says(tree: Path, kind: str, before: str, after: str, line: str) -> None:
    (name,) = [one for one in named_mutants(tree) if (one.kind, one.before, one.after) == (kind, before, after)]
    changed = mutated(tree, name).splitlines()
    assert [new for new, old in zip(changed, MODULE.splitlines(), strict=True) if new != old] == [line]


def test_every_mutant_is_a_module_that_differs(tree: Path) -> None:
    names = named_mutants(tree)
    modules = [ast.dump(ast.parse(mutated(tree, name))) for name in names]
    assert len(set(modules)) == len(names) > 15
    assert ast.dump(ast.parse(MODULE)) not in modules


def test_a_name_survives_a_move_a_new_message_and_a_new_function_name(tree: Path) -> None:
    names = named_mutants(tree)
    (tree / "lospmm/deeper").mkdir()
    moved = (tree / "lospmm/clamping.py").rename(tree / "lospmm/deeper/limits.py")
    moved.write_text(MODULE.replace("is negative", "is below 0"))
    assert set(named_mutants(tree)) == set(names)
    moved.write_text(MODULE.replace("def unused", "def twice").replace("and not most == 3", "and not most == 4"))
    later = named_mutants(tree)
    (doubling,) = [name for name in names if name.kind == "operator"]
    (comparison,) = [name for name in names if name.before == "value < 0" and name.kind == "comparison"]
    (gone,) = [name for name in names if name.before == "most == 3"]
    found = [find(name, later) for name in (doubling, comparison, gone)]
    assert [edit and edit.text for edit in found] == ["(a + 2)", "(value <= 0)", None]


def test_the_same_statement_twice_has_no_name(tree: Path) -> None:
    (tree / "lospmm/again.py").write_text("def unused(a: int) -> int:\n    return a * 2\n")
    assert not [name for name in named_mutants(tree) if name.function == "unused"]


def covering_of(tree: Path, lines: dict[str, list[int]], seconds: dict[str, float]) -> Covering:
    """As if a run of the suite had measured it."""
    work = tree.parent / "work"
    work.mkdir()
    data = suite.coverage.CoverageData(str(work / "coverage"))
    for context, ran in lines.items():
        data.set_context(context)
        data.add_arcs({str(tree / "lospmm/clamping.py"): [(-1, line) for line in ran]})
    data.write()
    text = "".join(
        f'{{"test": "{test}", "phase": "call", "outcome": "passed", "seconds": {took}}}\n'
        for test, took in seconds.items()
    )
    (work / "durations.jsonl").write_text(text)
    return Covering(tree, work)


def test_covering_tests_are_the_quickest_first(tree: Path) -> None:
    lines = {"": [2], f"{SLOW} (call)": [4, 6], f"{QUICK} (call)": [4], f"{QUICK} (setup)": [10]}
    covering = covering_of(tree, lines, {SLOW: 3.0, QUICK: 0.1, BLIND: 0.0})
    path = Path("lospmm/clamping.py")
    assert covering(path, [4]) == [QUICK, SLOW]
    assert covering(path, [6]) == [SLOW]
    assert covering(path, [10]) == [BLIND, QUICK, SLOW]  # a fixture of the file
    assert covering(path, [2]) == [QUICK, SLOW]  # when the module was imported
    assert covering(path, [5]) == []


@pytest.mark.parametrize(
    ("kind", "before", "after", "expected"),
    [
        ("default", "9", "8", Verdict("killed", QUICK, 2)),
        ("comparison", "value < 0", "value <= 0", Verdict("survived", None, 2)),
        ("operator", "a * 2", "a + 2", Verdict("uncovered")),
    ],
)
def test_a_mutant_is_killed_survives_or_is_not_covered(
    tree: Path, kind: str, before: str, after: str, expected: Verdict
) -> None:
    edit = edit_of(tree, kind, before, after)
    covering = covering_of(tree, {f"{SLOW} (call)": [4, 6], f"{QUICK} (call)": [4, 6]}, {SLOW: 0.2, QUICK: 0.1})
    found = try_mutant(Copy(tree, tree.parent / "copy"), edit, covering)
    assert (found.outcome, found.test, found.tests) == (expected.outcome, expected.test, expected.tests)
    assert (tree / "lospmm/clamping.py").read_text() == MODULE


def test_a_test_that_fails_without_the_mutant_kills_nothing(tree: Path) -> None:
    (tree / "tests/test_clamp.py").write_text(TESTS.replace("== 3", "== 4"))
    edit = edit_of(tree, "comparison", "value < 0", "value <= 0")
    covering = covering_of(tree, {f"{SLOW} (call)": [4]}, {SLOW: 0.2})
    assert try_mutant(Copy(tree, tree.parent / "copy"), edit, covering).outcome == "uncovered"


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_runs_is_ended_at_the_limit_with_its_processes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "pytest_command", lambda *_: ["sh", "-c", "setsid sleep 60 & echo $! > other; wait"])
    copy = Copy(tree, tree.parent / "copy")
    assert copy.pytest([], 0.5) == Run(None, {}, None, None)
    other = int((copy.root / "other").read_text())
    until = time.monotonic() + 10
    while not has_ended(other):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_run_tells() -> None:
    phases = [("a", "setup", "passed"), ("a", "call", "passed"), ("a", "teardown", "passed"), ("b", "setup", "passed")]
    lines = [
        {"test": test, "phase": phase, "outcome": outcome, "seconds": 1.5, "stop": 100.0}
        for test, phase, outcome in phases
    ]
    assert run_of(None, lines, 107.0) == Run(None, {"a": 4.5}, None, 7.0)
    assert run_of(1, [*lines, {**lines[3], "phase": "call", "outcome": "failed"}], 100.0).failed == "b"
    assert unfinished(run_of(-9, lines, 100.0), ["a", "b", "c"]) == "b"
    assert run_of(4, [], 100.0) == Run(4, {}, None, None)


def test_tests_are_chosen_by_their_time_and_hang_beyond_it() -> None:
    seconds = {"a": 1.0, "b": 58.0, "c": 2.0}
    assert chosen_tests(["a", "b", "c"], seconds) == ["a", "b"]
    assert chosen_tests(["b", "c"], {"b": 90.0, "c": 1.0}) == ["b"]
    assert chosen_tests([], {}) == []
    assert hanging_test(Run(None, {"a": 2.0}, None, 39.0), ["a", "c"], seconds) == "c"
    assert hanging_test(Run(None, {"a": 2.0}, None, 37.0), ["a", "c"], seconds) is None
    assert hanging_test(Run(None, {"a": 2.0, "c": 9.0}, None, 100.0), ["a", "c"], seconds) is None
    assert hanging_test(Run(None, {}, None, None), ["a", "c"], seconds) is None  # in collection


def test_packages_of_an_old_layout_are_those_where_its_statements_went(tree: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    (later / "lospmm/limits").mkdir(parents=True)
    (later / "lospmm/limits/clamping.py").write_text(MODULE)
    (later / "lospmm/none.py").write_text("")
    (tree / "lospmm/gone").mkdir()
    (tree / "lospmm/gone/away.py").write_text("VALUE = 1\n")
    found = packages_in(tree, later)
    assert found[Path("lospmm/clamping.py")] == "lospmm.limits"
    assert found[Path("lospmm/gone/away.py")] == "lospmm"
    assert package_of(Path("lospmm/codegen/sass/form.py")) == "lospmm.codegen"
    assert package_of(Path("server/lospmm_server/pages/views.py")) == "lospmm_server"
    with pytest.raises(ValueError, match="is in none of"):
        package_of(Path("tests/conftest.py"))


def test_coverage_counts_modules_that_never_ran(tree: Path) -> None:
    (tree / "lospmm/never.py").write_text("def never(a: int) -> int:\n    if a:\n        return 1\n    return 2\n")
    covering_of(tree, {f"{SLOW} (call)": [2, 4, 6, 9]}, {SLOW: 1.0})
    found = suite.coverage_by_package(tree, tree.parent / "work", packages_in(tree, tree))
    assert found == [{"package": "lospmm", "lines": 10, "lines_run": 4, "branches": 4, "branches_run": 0}]


def test_the_table_and_what_is_weaker() -> None:
    def covered(commit: str, ran: int) -> dict[str, object]:
        counts = {"lines": 100, "lines_run": 90, "branches": 200, "branches_run": ran}
        return {"what": "coverage", "commit": commit, "package": "lospmm", **counts}

    def tried(commit: str, number: int, outcome: str) -> dict[str, object]:
        return {"what": "mutant", "commit": commit, "mutant": number, "outcome": outcome}

    rows = [{"what": "sample", "mutant": number, "package": "lospmm"} for number in range(3)]
    rows += [covered("old", 180), covered("new", 178)]
    rows += [tried("old", number, outcome) for number, outcome in enumerate(("killed", "timeout", "survived"))]
    rows += [tried("new", number, outcome) for number, outcome in enumerate(("absent", "killed", "survived"))]
    assert table.weaker(rows) == []
    assert "| lospmm | 90.0 | 200 | 90.0 | 89.0 | 200 | 90.0 |" in table.tables(rows)
    assert "| all | 2 of 3 | 1 of 2 |" in table.tables(rows)
    rows += [covered("bad", 177), *(tried("bad", number, "survived") for number in range(3))]
    assert table.weaker(rows) == [
        "bad: branches of lospmm: 88.5 %, 90.0 % at old",
        "bad: kills 0 of 3 mutants, 2 at old",
        "bad: no longer killed: 0, 1",
    ]


def test_recorded_phases_are_added_up(tmp_path: Path) -> None:
    lines = [("a", "setup", "passed", 1.5), ("a", "call", "failed", 0.5), ("b", "call", "passed", 1.0)]
    (tmp_path / "durations.jsonl").write_text(
        "".join(f'{{"test": "{t}", "phase": "{p}", "outcome": "{o}", "seconds": {s}}}\n' for t, p, o, s in lines)
    )
    found = suite.recorded_tests(tmp_path)
    assert found == {"a": Recorded(2.0, {"passed", "failed"}), "b": Recorded(1.0, {"passed"})}
