"""What the package weighs: lines of code of each part, and the modules that a small tuning passes through.

    python -m benchmarks.package_size

A line of code is none that is blank, a comment or in a docstring. The tuning is of 64 x 48 weights, with nothing timed
or verified, behind one that loaded what is loaded once; a switch is a call from one module into another. Prints both.
"""

import ast
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_datasets.synthetic import uniform

PACKAGE = Path(__file__).parents[1] / "lospmm"

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(path: Path) -> int:
    """Return the lines of code of a file."""
    text = path.read_text()
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED)]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node, clean=False) is not None]
    skipped = {line for one in docstrings for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    lines = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in skipped)
    return sum(1 for line in lines if line and not line.startswith("#"))


def passed() -> tuple[set[str], int]:
    """Return the modules that the second of two equal tunings runs, and how many switches there are between them."""
    request = Request(
        Problem(uniform(64, 48, 0.9, seed=0), 128, DEVICES["h200"]), Options(measure="none", verify="none")
    )
    calls: list[str] = []

    def tracer(frame: FrameType, _event: str, _argument: object) -> None:
        if (name := str(frame.f_globals.get("__name__"))).startswith("lospmm"):
            calls.append(name)

    for trace in (None, tracer):
        with tempfile.TemporaryDirectory() as folder:
            sys.settrace(trace)
            jobs.tune(request, store=Store(Path(folder)))
            sys.settrace(None)
    return set(calls), sum(one != before for one, before in zip(calls, ["", *calls], strict=False))


def part_of(module: str) -> str:
    """Return the package of a module's name, or ``flat``."""
    owner, *rest = module.split(".")
    return owner if owner != PACKAGE.name else rest[0] if rest and (PACKAGE / rest[0]).is_dir() else "flat"


def main() -> None:
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[part_of(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))] += lines_of(path)
    modules, switches = passed()
    run = Counter(map(part_of, modules))
    for name in sorted(lines | run, key=lines.__getitem__, reverse=True):
        print(f"{name:12} {lines[name]:6,} lines {run[name]:3} modules of a small tuning")
    print(f"{'in all':12} {lines.total():6,} lines {len(modules):3} modules, {switches:,} switches")


if __name__ == "__main__":
    main()
