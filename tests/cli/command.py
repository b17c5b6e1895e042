"""The command line as tests call it: in this process, or in one of its own."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMMAND = (sys.executable, "-m", "lospmm.cli")
H200 = ("--device", "h200")


def draw(m: int, k: int, *, density: float = 0.2, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return np.where(rng.random((m, k)) < density, rng.standard_normal((m, k)), 0).astype(np.float32)


WEIGHTS = draw(4, 24)


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refusal is."""
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self.err
        assert self.err[:-1].isprintable()
        return self.err[len("error: ") : -1]


Command = Callable[..., Answer]


def process(*arguments: object, command: tuple[str, ...] = COMMAND, **options: Any) -> Answer:
    run = subprocess.run(
        [*command, *map(str, arguments)], **{"capture_output": True, "text": True, "timeout": 60, **options}
    )
    return Answer(run.returncode, run.stdout, run.stderr)
