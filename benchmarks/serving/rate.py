"""Throughput and latency of requests for finished kernels.

Requests go over a few persistent connections. ``closed``: each sends the next request once it has its answer, which
gives the throughput. ``open``: requests are due at fixed times, and a latency counts from then, so that waiting for an
earlier answer counts too.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from benchmarks.serving.crowd import COLUMNS, DEVICE
from lospmm.matrix.npz import write_npz
from lospmm_datasets.synthetic import uniform

Record = dict[str, Any]

#: m, k and share of zeros of the kernels that are asked for in turn: their cubins have some 20 to 200 kB.
LAYERS = ((64, 64, 0.9), (128, 128, 0.9), (256, 128, 0.9), (256, 256, 0.9))

CONNECTIONS = 16
SECONDS = 10.0

#: Requests a second of the open runs.
RATES = (1000, 1500)

Path = str


class Connection(asyncio.Protocol):
    """One request at a time; ``delays`` gets the seconds from when it was due to the end of its answer."""

    def __init__(self, delays: list[float]) -> None:
        self._delays, self._found, self._end = delays, bytearray(), 0
        self.is_free = asyncio.Event()
        self.fault: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_free.set()

    def ask(self, path: Path, due: float) -> None:
        self.is_free.clear()
        self._due = due
        self._transport.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self._found += data
        if not self._end:
            head = self._found.find(b"\r\n\r\n")
            if head < 0:
                return
            self._end = head + 4 + self._body_bytes(bytes(self._found[:head]).lower())
        if len(self._found) >= self._end:
            self._delays.append(time.perf_counter() - self._due)
            self._found.clear()
            self._end = 0
            self.is_free.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self.fault = self.fault or "the server has closed the connection"
        self.is_free.set()

    def close(self) -> None:
        self._transport.close()

    def _body_bytes(self, head: bytes) -> int:
        if not head.startswith(b"http/1.1 200 "):
            self.fault = head.decode("latin-1")
        start = head.index(b"content-length:") + len(b"content-length:")
        return int(head[start:].split(b"\r\n", 1)[0])


async def _run(port: int, paths: Sequence[Path], *, rate: int | None, seconds: float) -> list[float]:
    """The delays of a run; without a rate it is closed. Raises AssertionError for an answer that is not 200."""
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Connection(delays), "127.0.0.1", port) for _ in range(CONNECTIONS)]
    connections = [connection for _, connection in made]
    began = time.perf_counter()
    end, number = began + seconds, 0

    async def keep_asking(connection: Connection) -> None:
        nonlocal number
        while True:
            await connection.is_free.wait()
            assert connection.fault is None, connection.fault
            now = time.perf_counter()
            due = now if rate is None else began + number / rate
            if due >= end:
                return
            path = paths[number % len(paths)]
            number += 1
            if due > now:
                await asyncio.sleep(due - now)
            connection.ask(path, due)

    await asyncio.gather(*(keep_asking(connection) for connection in connections))
    for connection in connections:
        connection.close()
    return delays


def figures(delays: list[float], seconds: float) -> Record:
    ordered = sorted(delays)

    def millis(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 2)

    return {
        "requests": len(ordered),
        "requests_per_second": round(len(ordered) / seconds),
        "p50_ms": millis(0.5),
        "p90_ms": millis(0.9),
        "p99_ms": millis(0.99),
        "p999_ms": millis(0.999),
        "longest_ms": millis(1.0),
    }


def _in_another_process(port: int, paths: Sequence[Path], rate: int | None, seconds: float) -> Record:
    """Make one run from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.serving.rate", str(port), str(rate or 0), str(seconds), *paths]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def prepared(port: int) -> tuple[list[Path], list[int]]:
    """Tune the kernels; return the paths of their cubins, and the sizes in bytes."""
    paths, sizes = [], []
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        for m, k, sparsity in LAYERS:
            query: dict[str, str | int] = {"n": COLUMNS, "device": DEVICE, "wait": 100}
            answer = client.post("/v1/kernels", params=query, content=write_npz(uniform(m, k, sparsity, seed=0)))
            assert answer.status_code == 201, answer.text
            paths.append(answer.json()["links"]["cubin"])
            sizes.append(len(client.get(paths[-1]).content))
    return paths, sizes


def measure(port: int, *, repeats: int, seconds: float = SECONDS) -> list[Record]:
    """A record for each kind of run: the middle of its repeats by p99, all of them, and the load of the machine."""
    paths, sizes = prepared(port)
    records = []
    for rate in (None, *RATES):
        runs = []
        for _ in range(repeats):
            before = os.getloadavg()[0]
            runs.append({**_in_another_process(port, paths, rate, seconds), "load_before": round(before, 2)})
        middle = sorted(runs, key=lambda run: float(run["p99_ms"]))[len(runs) // 2]
        records.append(
            {
                "run": "closed" if rate is None else "open",
                "due_per_second": rate,
                "connections": CONNECTIONS,
                "cubin_bytes": sizes,
                "seconds": seconds,
                "middle": middle,
                "median_requests_per_second": statistics.median(run["requests_per_second"] for run in runs),
                "runs": runs,
            }
        )
    return records


def main() -> None:
    port, rate, seconds, *paths = sys.argv[1:]
    delays = asyncio.run(_run(int(port), paths, rate=int(rate) or None, seconds=float(seconds)))
    print(json.dumps(figures(delays, float(seconds))))


if __name__ == "__main__":
    main()
