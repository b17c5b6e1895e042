"""Single attacks on a service, each in figures, with what sound requests beside them met and how much is promised."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import safetensors.numpy

from benchmarks.serving import wire
from benchmarks.serving.crowd import DEVICE
from benchmarks.serving.site import Record, Site, beside, site
from lospmm.matrix.npz import write_npz
from lospmm_datasets.synthetic import uniform
from tests.fixtures.files import npy
from tests.fixtures.waiting import wait_until
from tests.server.disks import filled, mounted
from tests.server.processes import client_at

#: ``ulimit -n`` and connections of ``idle``, and for how long attackers hold what they have.
FILES, IDLE, HOLD_SECONDS = 64, 100, 15.0

#: Slow clients of each kind, the seconds between two of their bytes, LOSPMM_UPLOAD_SECONDS, and what a head may take.
SLOW, BYTE_SECONDS, UPLOAD_SECONDS, HEAD_SECONDS = 50, 1.0, 5.0, 10.0

#: Layers that are queued when the disk is full, and for how long it is.
LAYERS, FULL_SECONDS = 15, 10.0

#: Refused files at once, and the side of each: 64 MiB.
REFUSED, REFUSED_SIDE = 4, 4096

WRONG_KEYS, AT_ONCE = 2000, 20

#: Large jobs of one key before the small one of another, and their side.
LARGE, LARGE_SIDE = 5, 512

KERNELS = f"POST /v1/kernels?n=256&device={DEVICE}&wait="
HEALTH = "GET /healthz"


@dataclass(frozen=True, slots=True)
class Case:
    """An attack; ``most``: the greatest figures of its record that are promised."""

    run: Callable[[], Record]
    most: Mapping[str, float]

    def check(self, record: Record, *, times: bool = True) -> None:
        """Raise AssertionError where a promise is broken; of times too, unless others share the machine."""
        kept = {name: most for name, most in self.most.items() if times or not name.endswith(("_ms", "_seconds"))}
        broken = {name: record[name] for name, most in kept.items() if record[name] > most}
        assert not broken, (broken, kept, record)


def matrix(seed: int, side: int = 64) -> bytes:
    """A sound file."""
    return write_npz(uniform(side, side, 0.9, seed=seed))


def refused_file() -> bytes:
    """A dense matrix of 64 MiB whose last element is no number."""
    dense = np.zeros((REFUSED_SIDE, REFUSED_SIDE), "<f4")
    dense[::10, ::10], dense[-1, -1] = 1, np.nan
    return npy(dense.shape, "<f4", dense.tobytes())


async def held(port: int, count: int, seconds: float) -> int:
    """Hold idle connections; how many of them the server closed."""
    found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    await asyncio.sleep(seconds)
    closed = sum(reader.at_eof() for reader, _ in found)
    for _, writer in found:
        writer.close()
    return closed


async def dripped(port: int, head: bytes, seconds: float) -> float | None:
    """Send a head and then a byte now and then; the seconds until the server ends that, None where it did not."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    try:
        while time.monotonic() - began < seconds:
            try:
                await asyncio.wait_for(reader.read(1), BYTE_SECONDS)
                return time.monotonic() - began
            except TimeoutError:
                writer.write(b"x")
        return None
    except ConnectionError:
        return time.monotonic() - began
    finally:
        writer.close()


def idle() -> Record:
    with site(files=FILES) as at:
        before = at.unasked_bytes()
        closed, found = asyncio.run(beside(at.port, at.request(HEALTH), held(at.port, IDLE, HOLD_SECONDS)))
        log = at.unasked_bytes() - before
    return {"files": FILES, "connections": IDLE, "closed": closed, "log_bytes": log, **found}


def slow() -> Record:
    async def all_slow() -> list[float | None]:
        heads = [dripped(at.port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", 30.0) for _ in range(SLOW)]
        bodies = [dripped(at.port, wire.head(f"{KERNELS}0", "Content-Length: 1000"), 30.0) for _ in range(SLOW)]
        return await asyncio.gather(*heads, *bodies)

    with site(LOSPMM_UPLOAD_SECONDS=str(UPLOAD_SECONDS)) as at:
        ends, found = asyncio.run(beside(at.port, at.request(HEALTH), all_slow()))
    record: Record = {"heads": SLOW, "bodies": SLOW}
    for name, part in (("heads", ends[:SLOW]), ("bodies", ends[SLOW:])):
        record[f"{name}_never_ended"] = part.count(None)
        record[f"longest_{name}_seconds"] = round(max((end for end in part if end is not None), default=0.0), 1)
    return record | found


def disk() -> Record:
    """Raises PermissionError where this user may mount no disk."""
    with ExitStack() as stack:
        folder = stack.enter_context(mounted(Path("/tmp/lospmm-disk"), megabytes=256))
        at = stack.enter_context(site(workers=1, LOSPMM_CACHE_DIR=str(folder / "cache")))
        with client_at(at.port) as client:
            known = client.post(f"{KERNELS[5:]}60", content=matrix(0)).raise_for_status().json()["links"]["cubin"]
            layers = {f"layer{number}": _dense(number) for number in range(LAYERS)}
            query = {"n": "512", "device": DEVICE, "emitter": "ptx"}
            job = client.post("/v1/models", params=query, content=safetensors.numpy.save(layers)).headers["location"]
            refused: Counter[str] = Counter()

            def full() -> None:
                with filled(folder):
                    began = time.monotonic()
                    while time.monotonic() - began < FULL_SECONDS:
                        for answer in (client.get("/readyz"), client.post(f"{KERNELS[5:]}0", content=matrix(1))):
                            refused[f"{answer.status_code}, Retry-After: {'retry-after' in answer.headers}"] += 1
                        time.sleep(0.5)

            _, found = asyncio.run(beside(at.port, at.request(f"GET {known}"), asyncio.to_thread(full)))
            states = [layer["state"] for layer in client.get(job).json()["layers"]]
            wait_until(lambda: client.get(job).json()["state"] not in ("queued", "running"), 600.0)
            ended = Counter(layer["state"] for layer in client.get(job).json()["layers"])
    return {
        "layers": LAYERS,
        "full_seconds": FULL_SECONDS,
        "failed_while_full": states.count("failed"),
        "failed": LAYERS - ended["succeeded"],
        "refusals": dict(refused),
        "wrong_refusals": refused.total() - refused["503, Retry-After: True"],
        **found,
    }


def _dense(seed: int, side: int = 384) -> np.ndarray:
    dice = np.random.default_rng(seed)
    return np.where(dice.random((side, side)) < 0.1, dice.standard_normal((side, side)), 0).astype(np.float32)


async def sent(port: int, requests: Sequence[bytes], at_once: int) -> Counter[int]:
    """The statuses of the answers; 0 where the connection ended without one."""
    found: Counter[int] = Counter()
    for start in range(0, len(requests), at_once):
        answers = await asyncio.gather(*(wire.send(port, one) for one in requests[start : start + at_once]))
        found.update(answer.status for answer in answers)
    return found


def refused() -> Record:
    with site(workers=1) as at, client_at(at.port) as client:
        client.post(f"{KERNELS[5:]}60", content=matrix(0)).raise_for_status()
        large = [at.request(f"{KERNELS}0", refused_file())] * REFUSED
        attack = sent(at.port, large, REFUSED)
        statuses, found = asyncio.run(beside(at.port, at.request(f"{KERNELS}60", matrix(0)), attack))
    return {
        "files": REFUSED,
        "file_megabytes": 67,
        "statuses": dict(statuses),
        "other": REFUSED - statuses[422],
        **found,
    }


def malformed() -> Record:
    with site() as at:
        statuses, found = asyncio.run(beside(at.port, at.request("GET /v1/jobs"), sent(at.port, MALFORMED, AT_ONCE)))
    errors = sum(count for status, count in statuses.items() if status >= 500)
    return {"requests": len(MALFORMED), "statuses": dict(statuses), "server_errors": errors, **found}


def wrong_keys(right: str) -> list[str]:
    """Headers with wrong keys, some nearly right."""
    given = ("", right[:-1], right + "x", right.swapcase(), "lospmm_" + "A" * 43, "x" * 8000, "\xff\x80")
    return ["", *(f"Authorization: {kind} {key}" for kind in ("Bearer", "Basic", "Digest") for key in given)]


def keys() -> Record:
    with site(keys=("team",)) as at:
        before, wrong = at.unasked_bytes(), wrong_keys(at.keys["team"])
        requests = [at.request("GET /v1/jobs", b"", *filter(None, (header,))) for header in wrong]
        attack = sent(at.port, (requests * WRONG_KEYS)[:WRONG_KEYS], AT_ONCE)
        statuses, found = asyncio.run(beside(at.port, at.request("GET /v1/jobs", key="team"), attack))
        log = at.unasked_bytes() - before
    others = statuses.total() - statuses[401] - statuses[429] - statuses[400]
    return {"requests": WRONG_KEYS, "statuses": dict(statuses), "accepted": others, "log_bytes": log, **found}


def fair() -> Record:
    with site(workers=1, keys=("large", "small")) as at:
        posted = [at.request(f"{KERNELS}0&emitter=ptx", matrix(seed, LARGE_SIDE), key="large") for seed in range(LARGE)]
        posted.append(at.request(f"{KERNELS}0", matrix(0), key="small"))
        digests = [json.loads(asyncio.run(wire.send(at.port, request)).body)["id"] for request in posted]
        jobs = [ended(at, digest, key) for digest, key in zip(digests, ["large"] * LARGE + ["small"], strict=True)]
    small = jobs[-1]
    began, seconds = datetime.fromisoformat(small["started"]), [_seconds(job, "started", "ended") for job in jobs]
    first = sum(datetime.fromisoformat(job["ended"]) <= began for job in jobs[:-1])
    return {
        "large_jobs": LARGE,
        "ended_before_the_small_one": first,
        "large_seconds": round(max(seconds[:-1]), 1),
        "small_waited_seconds": round(_seconds(small, "created", "started"), 1),
    }


def ended(at: Site, job: str, key: str) -> Record:
    """A job once it has ended."""
    with client_at(at.port, Authorization=f"Bearer {at.keys[key]}") as client:
        wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["state"] not in ("queued", "running"), 600.0)
        return dict(client.get(f"/v1/jobs/{job}").json())


def _seconds(job: Record, begin: str, end: str) -> float:
    return (datetime.fromisoformat(job[end]) - datetime.fromisoformat(job[begin])).total_seconds()


_LINES = (
    "", "GET", "GET  /", "get / HTTP/1.1", "GET / HTTP/9.9", "GET / HTTP/1.1 x", "GET / HTTP/0.9", "\x00\xff\x80",
    "PRI * HTTP/2.0", "CONNECT a:1 HTTP/1.1", "TRACE / HTTP/1.1", "BREW / HTTP/1.1", "GET http://other/ HTTP/1.1",
    "GET /%00 HTTP/1.1", "GET /%zz HTTP/1.1", "GET /../../etc/passwd HTTP/1.1", "GET /v1/kernels/%2e%2e/x HTTP/1.1",
    "GET /v1/jobs?state=\xff HTTP/1.1", "GET /v1/jobs?cursor=99999999999999999999 HTTP/1.1", "\x16\x03\x01\x02\x00",
    f"GET /{'x' * 70_000} HTTP/1.1", f"GET /v1/jobs?{'a=b&' * 9000} HTTP/1.1", "DELETE /v1/jobs/%00 HTTP/1.1",
    "GET /v1/jobs/x/events HTTP/1.1",
)  # fmt: skip
_HEADERS = (
    "", "Host: a\r\nHost: b", "Host : a", " folded: x", "no colon", "X: \x00", "X\xff: y", f"X: {'y' * 70_000}",
    "\r\n".join(f"X{number}: y" for number in range(2000)), "Transfer-Encoding: gzip", "Content-Length: -1",
    "Transfer-Encoding: chunked\r\nContent-Length: 3", "Content-Length: 1\r\nContent-Length: 2", "Upgrade: h2c",
    "Expect: 200-maybe", "Range: bytes=9-1", "If-None-Match: \xff", "Accept: \xff/\x00", "Content-Type: multipart/x",
    "Last-Event-ID: -1", "X-Request-ID: {{7*7}}", "Authorization: \xff", "Content-Encoding: br", "Cookie: " + ";" * 999,
)  # fmt: skip

#: Malformed requests, or nearly: each line alone, then each header with GET and with POST to two routes.
MALFORMED = [f"{line}\r\nHost: localhost\r\n\r\n".encode("latin-1") for line in _LINES] + [
    f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n\r\n".encode("latin-1")
    for line in ("GET /v1/jobs", f"{KERNELS}0", "POST /v1/models")
    for header in _HEADERS
]

_SOUND = {"sound_refused": 0, "p99_ms": 1000}

CASES: Mapping[str, Case] = {
    "idle": Case(idle, {**_SOUND, "log_bytes": 1000}),
    "slow": Case(
        slow,
        {**_SOUND, "heads_never_ended": 0, "bodies_never_ended": 0}
        | {"longest_heads_seconds": HEAD_SECONDS + 2, "longest_bodies_seconds": UPLOAD_SECONDS + 2},
    ),
    "disk": Case(disk, {**_SOUND, "failed_while_full": 0, "failed": 0, "wrong_refusals": 0}),
    "refused": Case(refused, {**_SOUND, "other": 0}),
    "malformed": Case(malformed, {**_SOUND, "server_errors": 0}),
    "keys": Case(keys, {**_SOUND, "accepted": 0, "log_bytes": 10_000}),
    "fair": Case(fair, {"ended_before_the_small_one": 1}),
}
