"""The processes of the service as users start them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

from tests.fixtures.waiting import wait_until

SERVE = ("-m", "lospmm.cli", "serve", "--port", "0")
WORKER = ("-m", "lospmm.cli", "worker")


@contextmanager
def serving(directory: Path, arguments: Sequence[str] = SERVE) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of a service and its port."""
    log = directory / f"serve-{time.monotonic_ns()}.log"
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, *arguments], stdout=stream, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "/docs" in log.read_text() or process.poll() is not None)
        found = re.search(r"lospmm serves http://[0-9.]+:(\d+), described at", log.read_text())
        assert found, log.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process, which is killed in the end."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client_at(port: int, **headers: str) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=90, headers=headers)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def catches(process: int, number: signal.Signals) -> bool:
    """Whether it has a handler for a signal, which would otherwise end it (Linux: SigCgt)."""
    status = Path(f"/proc/{process}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s+([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def workers_of(server: int) -> list[psutil.Process]:
    """The workers beside a server."""
    return [child for child in psutil.Process(server).children() if is_alive(child) and "worker" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Nothing where it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def compilers(log: Path) -> list[psutil.Process]:
    """What runs on behalf of a slow toolkit, whose log is this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(log.parent) in " ".join(process.cmdline()) and process.pid != os.getpid() and is_alive(process):
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found
