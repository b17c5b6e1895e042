"""What the tests of docs/embedding.md share: its commands, its layers, and where cuda.h is."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cuda.pathfinder import find_nvidia_header_directory
from numpy.typing import NDArray

from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "embedding.md"
PROGRAM = ROOT / "examples" / "embedding.c"


def headers() -> Path:
    """The folder that has ``include/cuda.h``: what pip has put there, or a toolkit that is installed."""
    include = find_nvidia_header_directory("cudart")
    if include is None:
        pytest.skip("cuda.pathfinder finds no headers of the CUDA runtime on this machine")
    return Path(include).parent


def compiler(name: str) -> str:
    found = shutil.which(name)
    return found or pytest.skip(f"no {name} on this machine")


def commands() -> tuple[str, str]:
    """The page's scripts for C: the one that tunes, and the one that compiles and runs the program."""
    tune, program, _ = (block.text for block in blocks(PAGE.read_text()) if block.language == "sh")
    return tune, program


def printed() -> str:
    (text,) = (block.text for block in blocks(PAGE.read_text()) if block.language == "text")
    return text


def draw_layers(folder: Path) -> Mapping[str, NDArray[np.float32]]:
    """The layers of the page, in a new folder."""
    random, layers = np.random.default_rng(0), {}
    folder.mkdir()
    for name, shape in {"fc1": (64, 64), "fc2": (10, 64)}.items():
        layers[name] = np.where(random.random(shape) < 0.1, random.standard_normal(shape), 0).astype(np.float32)
        np.save(folder / f"{name}.npy", layers[name])
    return layers


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of the page in a folder that has this repository's ``examples``, with its ``lospmm``."""
    programs = folder / "programs"
    if not programs.exists():
        (folder / "examples").symlink_to(PROGRAM.parent)
        programs.mkdir()
        (programs / "lospmm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lospmm.cli "$@"\n')
        (programs / "lospmm").chmod(0o755)
    return subprocess.run(
        ("bash", "-ec", script),
        cwd=folder,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
