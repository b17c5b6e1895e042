"""A Ray cluster of the tests' own, in another process; the tests themselves do not import Ray."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Why a test is skipped, and what to do.
MISSING = "Ray is not installed: pip install 'lospmm[ray]'; it has no wheels for every version of Python"

IS_INSTALLED = importlib.util.find_spec("ray") is not None


@dataclass(frozen=True)
class Nodes:
    process: subprocess.Popen[str]
    folder: Path

    def add(self, name: str, *, cores: int = 1, gpus: int = 0) -> str:
        """Start a node, with its cache in ``folder``; the cluster's address."""
        return self._ask(f"add {name} {cores} {gpus}")

    def kill(self, name: str) -> None:
        self._ask(f"kill {name}")

    def _ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        assert answer, f"{command}: no answer"
        return answer


@contextmanager
def ray_nodes(folder: Path, **variables: object) -> Iterator[Nodes]:
    """No node yet. All of them have ``variables`` in their environment."""
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        **{name: str(value) for name, value in variables.items()},
    }
    command = (sys.executable, "-m", "tests.server.ray_nodes", str(folder))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Nodes(process, folder)
            process.communicate(timeout=60)  # stdin is closed
        finally:
            process.kill()
