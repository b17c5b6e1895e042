"""The structure of the code in figures: modules, imports and class names, from the source alone."""

import ast
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"lospmm": ".", "lospmm_server": "server", "lospmm_proxies": "proxies", "lospmm_rank": "rank_model"}

#: The most that there may be. Lower a figure when the code allows it; never raise one.
MOST_FLAT, MOST_LAYERS, MOST_CLASSES_TWICE, MOST_DEFERRED = 8, 10, 4, 9
LONGEST_CHAIN, WIDEST_FAN_OUT = 20, 14


@cache
def modules() -> dict[str, Path]:
    found = {}
    for name, folder in FOLDERS.items():
        for path in (ROOT / folder / name).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imported(node: ast.AST) -> set[str]:
    """The modules of the project that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules().keys()
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    submodules = {f"{node.module}.{alias.name}" for alias in node.names}
    whole = {node.module} if any(f"{node.module}.{alias.name}" not in modules() for alias in node.names) else set()
    return (submodules | whole) & modules().keys()


@cache
def imports() -> dict[str, frozenset[str]]:
    """What each module imports when it is imported itself."""
    found = {}
    for name in modules():
        body = tree(name).body
        blocks = [one for node in body if isinstance(node, ast.If | ast.Try) for one in ast.walk(node)]
        found[name] = frozenset(one for node in [*body, *blocks] for one in imported(node)) - {name}
    return found


@cache
def chain(name: str) -> int:
    """The modules of the longest chain of imports from one on; a circle has no end."""
    return 1 + max(map(chain, imports()[name]), default=0)


def test_few_modules_stand_flat() -> None:
    flat = [path for path in (ROOT / "lospmm").glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= MOST_FLAT


def test_the_contract_has_few_rows() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (rows,) = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    assert len(rows) <= MOST_LAYERS


def test_chains_of_imports_are_short() -> None:
    assert max(chain(name) for name in modules()) <= LONGEST_CHAIN


def test_no_module_imports_many() -> None:
    widest = max(imports(), key=lambda name: len(imports()[name]))
    assert len(imports()[widest]) <= WIDEST_FAN_OUT, widest


def test_few_imports_are_deferred() -> None:
    deferred = [
        f"{name}:{node.lineno}"
        for name in modules()
        for function in ast.walk(tree(name))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and imported(node)
    ]
    assert len(deferred) <= MOST_DEFERRED, deferred


def test_class_names_stand_once() -> None:
    names = Counter(
        node.name.lstrip("_") for name in modules() for node in tree(name).body if isinstance(node, ast.ClassDef)
    )
    assert len([name for name, count in names.items() if count > 1]) <= MOST_CLASSES_TWICE
