"""Invalid uploads by the thousand, and the memory of the server that refuses them."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from benchmarks.serving import large as large_files
from benchmarks.serving import wire
from benchmarks.serving.files import FAMILIES, SOUND
from benchmarks.serving.site import sampling
from benchmarks.serving.wire import Answer
from lospmm_server.unread import READ_BYTES

Record = dict[str, Any]

#: Of the server: a body that does not come is refused soon.
UPLOAD_SECONDS = 2.0
SETTINGS = {"LOSPMM_UPLOAD_SECONDS": str(UPLOAD_SECONDS)}

#: What the server may take, in bytes.
MEMORY_BYTES = 500_000_000
SAMPLE_SECONDS = 0.05

#: Uploads at the same time; bodies that do not come, and connections that are left, at the same time beside them.
AT_ONCE = 20
SLOW = 100

#: How many of each of the largest files are sent at a time.
LARGE_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Attack:
    """A request. ``statuses`` are those that it may get; ``is_parsed``: it gets behind HTTP's parser."""

    family: str
    request: bytes = field(repr=False)
    statuses: tuple[int, ...] = (422,)
    is_parsed: bool = True
    leaves: bool = False  # the client is gone once it has sent this


def _head(path: str, *headers: str) -> bytes:
    return wire.head(f"POST {path}", *headers)


def _raw(path: str, content: bytes, *headers: str) -> bytes:
    return _head(path, f"Content-Length: {len(content)}", *headers) + content


def _form(path: str, *parts: bytes, boundary: str = "x", end: bytes = b"--x--\r\n") -> bytes:
    body = b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + end
    return _raw(path, body, f"Content-Type: multipart/form-data; boundary={boundary}")


def _part(content: bytes, field_name: str = "matrix", file: str = "W") -> bytes:
    head = f'Content-Disposition: form-data; name="{field_name}"; filename="{file}"\r\n\r\n'
    return head.encode("utf-8", "replace") + content


KERNELS, MODELS = "/v1/kernels?n=16&device=h200&wait=0", "/v1/models?n=16&device=h200"

_FILE_NAMES = ("W", "../../etc/passwd", "a\\b", "%00", "é" * 1000, "W;rm -rf", "{{7*7}}", "CON", "." * 300, "<script>")


@st.composite
def _files(draw: st.DrawFn) -> Attack:
    """A file that is no matrix, raw or in a form, as a kernel or as a model."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    content, path = draw(FAMILIES[family]), draw(st.sampled_from([KERNELS, KERNELS, MODELS]))
    if draw(st.booleans()):
        return Attack(family, _form(path, _part(content, file=draw(st.sampled_from(_FILE_NAMES)))))
    encoding = draw(st.sampled_from([(), (), (), ("Content-Encoding: gzip",), ("Content-Type: text/html",)]))
    return Attack(family, _raw(path, content, *encoding), (415,) if "Content-Encoding: gzip" in encoding else (422,))


@st.composite
def _forms(draw: st.DrawFn) -> Attack:
    """A form that is damaged, or holds something else than one file."""
    sound = SOUND["npy"](draw(st.integers(1, 9)))
    number = draw(st.integers(2, 300))
    request = draw(
        st.sampled_from(
            [
                lambda: _form(KERNELS, _part(sound, "other")),
                lambda: _form(KERNELS, *[_part(sound)] * number),
                lambda: _form(KERNELS, _part(sound), _part(b"4096", "n")),
                lambda: _form(KERNELS, b'Content-Disposition: form-data; name="matrix"\r\n\r\n' + sound),
                lambda: _form(KERNELS, b"Content-Disposition: form-data\r\n\r\n" + sound),
                lambda: _form(KERNELS, b"X-Header: " + b"x" * 1000 * number + b"\r\n\r\n" + sound),
                lambda: _form(KERNELS, _part(sound), boundary="y" * number),
                lambda: _form(KERNELS, _part(sound), end=b""),
                lambda: _form(KERNELS, _part(sound), boundary='""'),
                lambda: _form(KERNELS),
                lambda: _form(MODELS, *[b'Content-Disposition: form-data; name="n"\r\n\r\n1'] * number),
                lambda: _form(MODELS, *[_part(sound, file="W")] * number),
                lambda: _raw(KERNELS, sound, "Content-Type: multipart/form-data"),
                lambda: _form(KERNELS, _form("/", _part(sound)).partition(b"\r\n\r\n")[2]),
            ]
        )
    )
    return Attack("forms", request(), (400,))


_PARAMETERS = ("n=0", "n=-1", "n=1e9", "n=99999999999999999999", "n=", "n=16&n2=1", "n=16&device=x", "n=16&seed=-1")
_MORE = ("n=16&wait=601", "n=16&wait=nan", "n=16&emitter=;ls", "n=16&verify=../..", "n=16&tensor=" + "x" * 2000, "")


@st.composite
def _parameters(draw: st.DrawFn) -> Attack:
    """A sound file with an invalid parameter."""
    path = f"/v1/kernels?{draw(st.sampled_from([*_PARAMETERS, *_MORE]))}"
    return Attack("parameters", _raw(path, SOUND["npy"](draw(st.integers(1, 9)))), (400, 422))


@st.composite
def _lengths(draw: st.DrawFn) -> Attack:
    """A Content-Length, or pieces, that are not those of the body. HTTP's parser refuses some of them itself."""
    content = SOUND["npy"](draw(st.integers(1, 9)))
    kind = draw(st.sampled_from(["too large", "no number", "two", "pieces", "left"]))
    if kind == "too large":
        length = draw(st.integers((256 << 20) + 1, 10**18))
        return Attack("lengths", _head(KERNELS, f"Content-Length: {length}") + content, (413,))
    if kind == "left":
        length = len(content) + draw(st.integers(1, 10**6))
        request = _head(KERNELS, f"Content-Length: {length}") + content
        return Attack("clients that leave", request, (0, 400), is_parsed=False, leaves=True)
    if kind == "pieces":
        size = draw(st.sampled_from(["zz", "-5", "", "1" * 30, "0x10"]))
        request = _head(KERNELS, "Transfer-Encoding: chunked") + f"{size}\r\n".encode() + content + b"\r\n0\r\n\r\n"
        return Attack("lengths", request, (400,), is_parsed=False)
    number = draw(st.integers(1, 99))
    wrong = (
        f"{number}\r\nContent-Length: {number + 1}"
        if kind == "two"
        else draw(st.sampled_from(["-1", "x", "1.5", "9" * 40]))
    )
    return Attack("lengths", _head(KERNELS, f"Content-Length: {wrong}") + content, (400,), is_parsed=False)


ATTACKS = st.one_of(_files(), _files(), _files(), _files(), _forms(), _parameters(), _lengths())


@dataclass(slots=True)
class Memory:
    """Samples of a process: its resident bytes."""

    process: int
    samples: list[int] = field(default_factory=list)

    def peak(self) -> int:
        """The most that it has had since it began (Linux: VmHWM), not only in a sample."""
        return max([self._read("VmHWM"), *self.samples])

    def now(self) -> int:
        return self._read("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far (Linux: 5 in clear_refs)."""
        self.samples.clear()
        Path(f"/proc/{self.process}/clear_refs").write_text("5")

    def sample(self) -> None:
        self.samples.append(self.now())

    def _read(self, name: str) -> int:
        status = Path(f"/proc/{self.process}/status").read_text()
        (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kibibytes) << 10


@contextmanager
def sampled(process: int) -> Iterator[Memory]:
    memory = Memory(process)
    with sampling(memory.sample, SAMPLE_SECONDS):
        yield memory


def siege(port: int, process: int, *, uploads: int) -> list[Record]:
    """At least so many uploads to the server, whose process this is, each refused for a reason.

    Raises AssertionError at the first that is not, and where the server takes more than MEMORY_BYTES.
    """
    counted: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    began = time.monotonic()
    slow = [Attack("slow bodies", _head(KERNELS, "Content-Length: 1000") + b"x", (408,))] * SLOW
    with sampled(process) as memory:
        for attacks in [slow, *_drawn(uploads - SLOW)]:
            statuses.update(answered(port, attacks))
            counted.update(attack.family for attack in attacks)
    record = {
        "uploads": counted.total(),
        "families": dict(sorted(counted.items())),
        "statuses": dict(sorted(statuses.items())),
        "seconds": round(time.monotonic() - began, 1),
        "peak_megabytes": round(memory.peak() / 1e6),
        "median_megabytes": round(float(np.median(memory.samples)) / 1e6),
    }
    assert memory.peak() < MEMORY_BYTES, record
    return [record]


def largest(port: int, process: int) -> list[Record]:
    """The files of ``large``, each LARGE_AT_ONCE times at once; raises as ``siege``, once all were sent."""
    peaks: dict[str, int] = {}
    statuses: Counter[str] = Counter()
    began = time.monotonic()
    with sampled(process) as memory:
        for files, status in ((large_files.REFUSED, 422), (large_files.SOUND, 202)):
            for name, make in files.items():
                attacks = [large(make(), status)] * LARGE_AT_ONCE
                memory.restart()
                statuses.update(answered(port, attacks))
                peaks[name] = memory.peak()
    record = {
        "files": len(peaks),
        "at_once": LARGE_AT_ONCE,
        "file_megabytes": large_files.MEGABYTES,
        "statuses": dict(sorted(statuses.items())),
        "seconds": round(time.monotonic() - began, 1),
        "peak_megabytes": round(max(peaks.values()) / 1e6),
        "peaks_megabytes": {name: round(peak / 1e6) for name, peak in peaks.items()},
    }
    assert max(peaks.values()) < MEMORY_BYTES, record
    return [record]


def answered(port: int, attacks: Sequence[Attack]) -> list[str]:
    """The statuses of the answers to all at once. Raises AssertionError as ``check``."""
    answers = asyncio.run(_all_sent(port, attacks))
    for attack, answer in zip(attacks, answers, strict=True):
        check(attack, answer)
    return [str(answer.status) for answer in answers]


def check(attack: Attack, answer: Answer) -> None:
    """Raises AssertionError unless it was refused as it is to be, with a reason of one line.

    Of a longer body than is read after a refusal, the end of the connection may reach the client before the answer does
    (docs/operations.md).
    """
    if answer.status == 0 and len(attack.request) > READ_BYTES:
        return
    assert answer.status in attack.statuses, (attack, attack.request[:300], answer)
    if not attack.is_parsed:
        return
    problem = answer.problem
    assert problem.get("status") == answer.status, (attack, answer)
    assert str(problem["type"]).startswith("/problems/"), (attack, answer)
    assert problem["detail"] and "\n" not in problem["detail"], (attack, answer)


def _drawn(uploads: int) -> list[list[Attack]]:
    """So many attacks, AT_ONCE a list."""
    found: list[list[Attack]] = []

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=uploads,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(ATTACKS)
    def draw(attack: Attack) -> None:
        if not found or len(found[-1]) == AT_ONCE:
            found.append([])
        found[-1].append(attack)

    draw()
    return found


async def _all_sent(port: int, attacks: Sequence[Attack]) -> list[Answer]:
    return await asyncio.gather(*(wire.send(port, attack.request, leaves=attack.leaves) for attack in attacks))


def large(content: bytes, status: int = 422) -> Attack:
    return Attack("large files", _raw(KERNELS, content), (status,), is_parsed=status == 422)
