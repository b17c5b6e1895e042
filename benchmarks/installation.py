"""What an installation takes: MB of site-packages, and seconds and modules of an import, for each extra.

    python -m benchmarks.installation [--out FILE]

Each extra goes into a virtual environment of its own, made of this checkout's wheel and what PyPI has. MB are 10^6
bytes as pip leaves them, with bytecode, without pip; seconds are the least of nine processes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Row, write_results

EXTRAS = ("", "client", "tune", "server", "ray")
STATEMENTS = ("import numpy", "import lospmm; lospmm.load")

_COUNTED = "import sys; {}; print(len(sys.modules), sum(name.startswith('lospmm') for name in sys.modules))"


def megabytes(site: Path) -> float:
    """What pip installed, without itself and what it brings."""
    others = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
    files = (path for path in site.rglob("*") if path.is_file())
    kept = (path for path in files if not path.relative_to(site).parts[0].startswith(others))
    return round(sum(path.stat().st_size for path in kept) / 1e6, 1)


def timed(python: Path, code: str) -> float:
    """Seconds of a process that runs ``code``, at least."""
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        subprocess.run([python, "-c", code], check=True, cwd="/")
        seconds.append(time.perf_counter() - began)
    return round(min(seconds), 3)


def installed(wheel: Path, extra: str, folder: Path) -> Row:
    """Install the wheel with an extra and measure it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([python, "-m", "pip", "install", "--quiet", wanted], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    counted = [str(python), "-c", _COUNTED.format(STATEMENTS[1])]
    every, ours = map(int, subprocess.run(counted, check=True, capture_output=True, cwd="/").stdout.split())
    times = {statement: timed(python, statement) for statement in STATEMENTS}
    return {"extra": extra, "megabytes": megabytes(site), "seconds": times, "modules": every, "own_modules": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/installation.jsonl"))
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, "."]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("lospmm-*.whl")
        rows = []
        for extra in EXTRAS:
            rows.append(installed(wheel, extra, Path(folder, extra or "core")))
            print(rows[-1], flush=True)
    write_results(out, {row["extra"]: row for row in rows})


if __name__ == "__main__":
    main()
