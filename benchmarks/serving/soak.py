"""All attacks at once on one service, for a given time: memory, descriptors, threads and latency must stay flat.

Run as a program, this is the sound client beside them, in a process of its own: PORT, SECONDS, and its request on
stdin. It prints a line when it begins, and then when each request began, its status and its seconds.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import psutil
from scipy.stats import theilslopes

from benchmarks.serving import attacks, wire
from benchmarks.serving.attacks import KERNELS, MALFORMED, matrix
from benchmarks.serving.chaos import ENDLESS_ATTEMPTS
from benchmarks.serving.site import PAUSE_SECONDS, Record, Site, figures, sampling, site, timed
from tests.fixtures.waiting import wait_until
from tests.server.disks import filled, mounted
from tests.server.processes import client_at, workers_of

#: Parts of the time that are looked at apart, and how many of the first may differ: caches fill in them.
WINDOWS, WARM = 20, 5

#: How much a figure may rise over the windows after these, by the median slope: of memory, twice what the manifests of
#: many small kernels take once they have replaced few large ones; of the others, what comes and goes with attackers in
#: a short soak. A leak by the request is thousands. Times are factors.
MOST = {"megabytes": 40.0, "descriptors": 100.0, "threads": 40.0}
MOST_TIMES = {"p50_ms": 2.0, "p99_ms": 2.0}

#: Seconds between two rounds of each attack, those that a full disk lasts, and what the disk holds at all.
EVERY = {"refused": 30.0, "malformed": 1.0, "keys": 1.0, "kill": 20.0, "crowd": 10.0, "fair": 60.0}
FULL_SECONDS, DISK_MEGABYTES = 5.0, 3072

CLIENTS, MATRICES, SAMPLE_SECONDS = 40, 4, 0.5

#: Kernels of 256 x 256, files of 1.1 MB each, that fill the server's in-memory cache (shelf.SHELF_BYTES).
SHELVED = 64


class Siege:
    """Attacks on a service until an end; ``seen`` counts what they met: (attack, status or event)."""

    def __init__(self, at: Site, end: float) -> None:
        self._at, self._end = at, end
        self.seen: Counter[tuple[str, str]] = Counter()
        self._seeds = count(1)

    async def run(self, disk: Path | None, pause: float) -> None:
        """All of them; the disk of the cache, if it is one of its own, is full after every pause."""
        port = self._at.port
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
        body = self._at.request(f"{KERNELS}0", b"", "Content-Length: 1000", key="large")
        rounds = [
            self._repeated(0.0, lambda: attacks.held(port, 100, 15.0)),
            *(self._repeated(0.0, lambda: attacks.dripped(port, head, 30.0)) for _ in range(20)),
            *(self._repeated(0.0, lambda: attacks.dripped(port, body, 30.0)) for _ in range(20)),
            *(self._repeated(every, getattr(self, name)) for name, every in EVERY.items()),
        ]
        if disk is not None:
            rounds.append(self._repeated(pause, lambda: self.fill(disk), waits_first=True))
        await asyncio.gather(*rounds)

    async def refused(self) -> None:
        large = self._at.request(f"{KERNELS}0", attacks.refused_file(), key="large")
        await self._sent("refused", [large] * attacks.REFUSED, attacks.REFUSED)

    async def malformed(self) -> None:
        first = next(self._seeds) * 8 % len(MALFORMED)
        await self._sent("malformed", MALFORMED[first : first + 8], 4)

    async def keys(self) -> None:
        wrong = attacks.wrong_keys(self._at.keys["large"])
        await self._sent("keys", [self._at.request("GET /v1/jobs", b"", *filter(None, (one,))) for one in wrong], 4)

    async def kill(self) -> None:
        for worker in workers_of(self._at.process):
            worker.kill()
            self.seen["kill", "worker"] += 1

    async def crowd(self) -> None:
        """Many clients post few new matrices: each waits for its cubin, and equal ones get the same bytes."""
        accept = "Accept: application/octet-stream"
        files = [matrix(next(self._seeds)) for _ in range(MATRICES)]
        wanted = [self._at.request(f"{KERNELS}60", file, accept, key="large") for file in files]
        answers = await asyncio.gather(*(wire.send(self._at.port, wanted[at % MATRICES]) for at in range(CLIENTS)))
        self.seen.update(("crowd", str(answer.status)) for answer in answers)
        for at in range(MATRICES):
            bodies = {answer.body for answer in answers[at::MATRICES] if answer.status == 201}
            self.seen["crowd", "different bytes"] += len(bodies) > 1

    async def fair(self) -> None:
        """Large jobs of one key, and a small one of another."""
        large = [
            self._at.request(f"{KERNELS}0&emitter=ptx", matrix(next(self._seeds), 512), key="large") for _ in range(5)
        ]
        small = self._at.request(f"{KERNELS}60", matrix(next(self._seeds)), key="small")
        await self._sent("fair", [*large, small], 1)

    async def fill(self, disk: Path) -> None:
        def full() -> None:
            with filled(disk):
                time.sleep(FULL_SECONDS)

        await asyncio.to_thread(full)
        self.seen["disk", "full"] += 1

    async def _sent(self, attack: str, requests: Sequence[bytes], at_once: int) -> None:
        statuses = await attacks.sent(self._at.port, requests, at_once)
        self.seen.update({(attack, str(status)): number for status, number in statuses.items()})

    async def _repeated(self, pause: float, attack: Callable[[], Awaitable[object]], waits_first: bool = False) -> None:
        while time.monotonic() + waits_first * pause < self._end:
            if waits_first:
                await asyncio.sleep(pause)
            try:
                await attack()
            except OSError:  # the server closed a connection while something was sent
                self.seen["connections", "broken"] += 1
            if not waits_first:
                await asyncio.sleep(pause)


@contextmanager
def _sampled(process: int) -> Iterator[list[Record]]:
    found: list[Record] = []
    watched = psutil.Process(process)

    def sample() -> None:
        with watched.oneshot():
            megabytes, threads = watched.memory_info().rss / 1e6, watched.num_threads()
        figures = {"megabytes": megabytes, "descriptors": watched.num_fds(), "threads": threads}
        found.append({"at": time.monotonic(), **figures})

    with sampling(sample, SAMPLE_SECONDS):
        yield found


def soak(seconds: float, shelved: int = 0) -> Record:
    """The figures of each window, their rises, and what attackers met; ``check`` holds them to their limits.

    ``shelved``: so many kernels of a megabyte are requested first; SHELVED fill the server's cache of them.
    """
    with ExitStack() as stack:
        settings = {"LOSPMM_MAX_ATTEMPTS": ENDLESS_ATTEMPTS, "LOSPMM_UPLOAD_SECONDS": "20"}
        try:
            disk = stack.enter_context(mounted(Path("/tmp/lospmm-soak"), megabytes=DISK_MEGABYTES))
            settings["LOSPMM_CACHE_DIR"] = str(disk / "cache")
        except PermissionError:
            disk = None
        at = stack.enter_context(site(files=512, workers=1, keys=("large", "small"), **settings))
        with client_at(at.port, Authorization=f"Bearer {at.keys['small']}") as client:
            for seed in range(shelved):
                client.post(f"{KERNELS[5:]}60", content=matrix(seed, 256)).raise_for_status()
            kernel = client.post(f"{KERNELS[5:]}60", content=matrix(0)).raise_for_status().json()
        request = at.request(f"GET {kernel['links']['cubin']}", key="small")
        command = [sys.executable, "-m", "benchmarks.serving.soak", str(at.port), str(seconds)]
        sound = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert sound.stdin is not None and sound.stdout is not None
        sound.stdin.write(request)
        sound.stdin.close()
        sound.stdout.readline()
        began = time.monotonic()
        siege = Siege(at, began + seconds)
        with _sampled(at.process) as samples:
            asyncio.run(siege.run(disk, max(20.0, seconds / 20)))
        answers = json.loads(sound.stdout.read())
        failed = _failures(at)
    windows = [_window(samples, answers, began, seconds / WINDOWS, number) for number in range(WINDOWS)]
    seen: dict[str, dict[str, int]] = {}
    for (attack, what), number in sorted(siege.seen.items()):
        seen.setdefault(attack, {})[what] = number
    return {
        "seconds": seconds,
        "shelved": shelved,
        "disk": "full now and then" if disk else "skipped: this user may mount none",
        **figures([(status, delay) for _, status, delay in answers], seconds),
        "server_errors": sum(number for (_, what), number in siege.seen.items() if what[0] == "5" and what != "503"),
        "failed_jobs": len(failed),
        "failures": sorted(set(failed)),
        "rises": {name: round(rise(windows, name), 1) for name in (*MOST, *MOST_TIMES)},
        "seen": seen,
        "windows": windows,
    }


def check(record: Record, *, times: bool = True) -> None:
    """Raise AssertionError where anything was lost, refused or not flat; of times too, unless others use the CPUs."""
    assert record["sound_refused"] == record["server_errors"] == record["failed_jobs"] == 0, record
    assert not record["seen"]["crowd"]["different bytes"], record
    for name, most in MOST.items():
        assert record["rises"][name] <= most, (name, record)
    for name, most in MOST_TIMES.items() if times else ():
        early, late = (statistics.median(row[name] for row in part) for part in _thirds(record["windows"]))
        assert late <= most * early, (name, record)


def print_windows(record: Record) -> None:
    """The samples in time, as a table."""
    names = list(record["windows"][0])
    print("".join(f"{name:>12}" for name in names))
    for row in record["windows"]:
        print("".join(f"{row[name]:>12}" for name in names))


def _thirds(windows: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    rest = windows[WARM:]
    return rest[: len(rest) // 3], rest[-(len(rest) // 3) :]


def rise(windows: Sequence[Record], name: str) -> float:
    """From the first to the last window that counts, by the median of all slopes: a peak does not matter."""
    rest = windows[WARM:]
    return float(theilslopes([row[name] for row in rest])[0]) * (len(rest) - 1)


def _window(
    samples: Sequence[Record], answers: Sequence[tuple[float, int, float]], began: float, long: float, number: int
) -> Record:
    start = began + number * long
    now = [sample for sample in samples if start <= sample["at"] < start + long]
    served = [(status, delay) for at, status, delay in answers if at < start + long and start <= at + delay]
    middle = {name: round(statistics.median(sample[name] for sample in now)) for name in MOST}
    return {"second": round(number * long), **middle, **figures(served, long)}


def _failures(at: Site) -> list[str]:
    """Why jobs have failed, once all have ended; a key without a team sees those of all keys."""
    with client_at(at.port, Authorization=f"Bearer {at.keys['small']}") as client:
        for state in ("queued", "running"):
            wait_until(lambda state=state: not client.get("/v1/jobs", params={"state": state}).json()["jobs"], 600.0)
        return [job["error"]["detail"] for job in client.get("/v1/jobs", params={"state": "failed"}).json()["jobs"]]


def main() -> None:
    port, seconds, request = int(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer.read()
    print("begun", flush=True)
    answers, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        answers.append((began, *asyncio.run(timed(port, request))))
        time.sleep(PAUSE_SECONDS)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
