"""Bodies that are too large, not whole, or hostile."""

import asyncio
import gc
import resource
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from lospmm.settings import settings
from lospmm.tuning.request import Request
from lospmm_server import api, disk
from lospmm_server.access import AccessLog
from lospmm_server.schemas import KernelQuery
from lospmm_server.service import SMALL_BYTES
from lospmm_server.uploads import FORM_BYTES, Received
from tests.fixtures.files import csr, npy, npz, safetensors, tensor
from tests.fixtures.waiting import wait_until
from tests.server.conftest import npy_file
from tests.server.processes import SERVE, client_at, serving
from tests.server.served import served

POST = "/v1/kernels?n=16&device=h200&wait=60"

#: A service that may have 256 files open.
FEW_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
runpy.run_module("lospmm.cli", run_name="__main__")
"""


@pytest.fixture(scope="module")
def frozen() -> None:
    """Leave what there is by now out of what the garbage collector looks through."""
    gc.freeze()


HOSTILE = {
    "empty": b"",
    "text": b"GIF89a, not a matrix",
    "a header that promises 32 GiB": npy((2**16, 2**17)),
    "an archive that inflates": npz([("data.npy", npy((2**24,), values=bytes(2**26)))]),
    "a member outside": npz([("../data.npy", b"")]),
    "an unknown compression": npz([("data.npy", b"x")], zipfile.ZIP_LZMA),
    "an index out of range": csr(indices=[0, 9, 1]),
    "offsets that fall": csr(indptr=[0, 3, 2]),
    "NaN": csr(data=[1.0, float("nan"), 1.0]),
    "too many nonzeros": b"%%MatrixMarket matrix coordinate real general\n9 9 999999999\n",
    "a tensor that points out": safetensors({"../w": tensor("F32", [1, 1], 0, 4)}, bytes(4)),
    "cut": npy_file()[:-1],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("is_form", [False, True], ids=["raw", "form"])
def test_hostile_files(shared: TestClient, content: bytes, *, is_form: bool) -> None:
    body = {"files": {"matrix": ("W", content)}} if is_form else {"content": content}
    answer = shared.post(POST, **body)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["type"]) == (422, 422, "/problems/bad-matrix")
    assert problem["detail"]
    assert "\n" not in problem["detail"]


@pytest.mark.parametrize("name", ["../../etc/W.npy", 'a"b.npy', "a\\b.npy", "W.npy\x00", "é" * 1000 + ".npy"])
def test_hostile_names(shared: TestClient, name: str) -> None:
    assert shared.post(POST, files={"matrix": (name, npy_file())}).status_code == 201


def boundary(*parts: bytes) -> dict[str, object]:
    body = b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + b"--x--\r\n"
    return {"content": body, "headers": {"Content-Type": "multipart/form-data; boundary=x"}}


def part(field: str, name: str, content: bytes) -> bytes:
    return f'Content-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'.encode() + content


def without_its_end(form: dict[str, object]) -> dict[str, object]:
    return {**form, "content": form["content"][:-20]}


FORMS = {
    "no field": {"files": {"other": ("W.npy", b"x")}},
    "two files": {"files": [("matrix", ("W.npy", b"x")), ("matrix", ("V.npy", b"x"))]},
    "two fields": {"files": {"matrix": ("W.npy", b"x")}, "data": {"n": "4096"}},
    "text, not a file": boundary(b'Content-Disposition: form-data; name="matrix"\r\n\r\nx'),
    "no name": boundary(b"Content-Disposition: form-data\r\n\r\nx"),
    "no boundary": {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
    "another boundary": {"content": b"--y\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
    "cut": {
        "content": b'--x\r\nContent-Disposition: form-data; name="matrix"; filename="W"\r\n\r\nx',
        "headers": {"Content-Type": "multipart/form-data; boundary=x"},
    },
    "cut in its bias": without_its_end(
        boundary(part("matrix", "W.npy", npy_file()), part("bias", "b.npy", npy((16,), values=bytes(64))))
    ),
    "of bytes that its charset does not have": {
        **boundary(part("matrix", "W.npy", npy_file())),
        "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=undefined"},
    },
}


# Starlette leaves the file of a part that is not whole to the garbage collector, which complains.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_hostile_forms(shared: TestClient, form: dict[str, object]) -> None:
    answer = shared.post(POST, **form)
    gc.collect()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/bad-body")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_model_whose_form_is_cut_is_not_tuned_without_its_last_layer(client: TestClient) -> None:
    form = without_its_end(boundary(part("matrix", "a.npy", npy_file(1)), part("matrix", "b.npy", npy_file(2))))
    answer = client.post("/v1/models?n=16&device=h200", **form)
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/bad-body")
    assert "boundary" in answer.json()["detail"]
    assert client.get("/v1/jobs").json()["jobs"] == []


def pieces(content: bytes) -> Iterator[bytes]:
    """A body without Content-Length."""
    for start in range(0, len(content), 1000):
        yield content[start : start + 1000]


class TestLimit:
    @pytest.fixture(autouse=True)
    def tiny(self, set_environment: Callable[[str, object], None]) -> None:
        set_environment("LOSPMM_MAX_UPLOAD_BYTES", len(npy_file()))

    def test_as_much_as_is_allowed(self, shared: TestClient) -> None:
        assert shared.post(POST, content=npy_file()).status_code == 201
        assert shared.post(POST, content=pieces(npy_file())).status_code == 201
        assert shared.post(POST, files={"matrix": ("W.npy", npy_file())}).status_code == 201

    @pytest.mark.parametrize("more", [1, FORM_BYTES, 10 * FORM_BYTES])
    def test_more_is_refused(self, shared: TestClient, more: int) -> None:
        content = npy_file() + bytes(more)
        form = shared.build_request("POST", POST, files={"matrix": ("W.npy", content)})
        chunked_form = {"Content-Type": form.headers["content-type"]}
        for answer in (
            shared.post(POST, content=content),
            shared.post(POST, content=pieces(content)),
            shared.send(form),
            shared.post(POST, content=pieces(form.read()), headers=chunked_form),
        ):
            assert answer.headers["content-type"] == "application/problem+json"
            assert (answer.status_code, answer.json()["type"]) == (413, "/problems/too-large")
            assert str(settings().max_upload_bytes) in answer.json()["detail"]

    def test_an_endless_body_is_left_at_the_limit(self, shared: TestClient) -> None:
        sent = []

        def endless() -> Iterator[bytes]:
            while len(sent) < 1000:
                sent.append(1)
                yield bytes(1000)

        assert shared.post(POST, content=endless()).status_code == 413


def test_nothing_of_an_upload_stays(shared: TestClient, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    large = npy((2**10, 2**9), values=bytes(2**21))
    for body in ({"content": large}, {"files": {"matrix": ("W.npy", large + b"x")}}, {"content": large[:-1]}):
        shared.post(POST, **body)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("is_form", [False, True], ids=["raw", "form"])
def test_a_disk_that_takes_no_upload(shared: TestClient, monkeypatch: pytest.MonkeyPatch, *, is_form: bool) -> None:
    """As one that is full: it is said, and may go by."""
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    large = npy((2**10, 2**9), values=bytes(2**21))
    answer = shared.post(POST, **({"files": {"matrix": ("W.npy", large)}} if is_form else {"content": large}))
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
    assert answer.headers["retry-after"]
    assert "takes no upload now: No such file or directory" in answer.json()["detail"]
    ready = shared.get("/readyz")
    assert (ready.status_code, ready.json()["type"]) == (503, "/problems/unavailable")
    assert "/proc/nowhere" in ready.json()["detail"]


def test_a_disk_that_is_full_is_not_ready(shared: TestClient) -> None:
    """It takes files all the same, as long as nothing is in them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk.PROBE_BYTES // 2, hard))
    try:
        answer = shared.get("/readyz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert answer.status_code == 503
    assert "no place for temporary files: " in answer.json()["detail"]
    assert shared.get("/readyz").status_code == 200


@pytest.mark.slow
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """Small ones are none: a model of hundreds of layers may come as a form."""
    layers = [("matrix", (f"layer{number}.npy", npy_file(number % 3))) for number in range(400)]
    with serving(tmp_path, ("-c", FEW_FILES, *SERVE[2:], "--workers", "0")) as (_, port), client_at(port) as client:
        answer = client.post("/v1/models?n=16&device=h200&wait=0", files=layers)
        assert answer.status_code == 202, answer.text


@pytest.mark.slow
def test_files_of_a_form_take_little_memory(tmp_path: Path) -> None:
    """Each is below what Starlette keeps of one; the last boundary is held back, so that all are held."""
    content, boundary = bytes(900_000), b"--x\r\nContent-Disposition: form-data; name=matrix; filename=W.npy\r\n\r\n"
    body = (boundary + content + b"\r\n") * 200
    head = f"POST {POST} HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    head = head.replace("kernels", "models") + f"Content-Length: {len(body) + 5}\r\n\r\n"
    with (
        serving(tmp_path, (*SERVE, "--workers", "0")) as (process, port),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        held = psutil.Process(process.pid).memory_info().rss
        client.sendall(head.encode() + body)
        wait_until(lambda: psutil.Process(process.pid).num_fds() >= 200)
        assert psutil.Process(process.pid).memory_info().rss - held < len(body) // 2


def test_who_is_in_the_middle_of_a_request_at_the_end_is_told_so() -> None:
    """As uvicorn does with requests that are not done when an orderly end has waited for them."""
    sent: list[Any] = []

    async def endless(_scope: object, _receive: object, _send: object) -> None:
        await asyncio.Event().wait()

    async def send(message: object) -> None:
        sent.append(message)

    async def request() -> None:
        metrics: Any = SimpleNamespace(request_served=lambda *_: None)
        scope = {"type": "http", "method": "POST", "path": "/v1/kernels", "headers": []}
        task = asyncio.create_task(AccessLog(endless, metrics)(scope, send, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(request())
    begin, body = sent
    headers = dict(begin["headers"])
    assert (begin["status"], headers[b"retry-after"]) == (503, b"10")
    assert headers[b"content-type"] == b"application/problem+json"
    assert b"the service is stopping; post again later" in body["body"]


def test_a_body_that_does_not_come(set_environment: Callable[[str, object], None]) -> None:
    set_environment("LOSPMM_UPLOAD_SECONDS", 0.5)
    head = f"POST {POST} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx"
    with served(workers=0) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(10)
        slow.sendall(head.encode())
        answer = b"".join(iter(lambda: slow.recv(10_000), b""))  # the connection is closed, too
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"/problems/too-slow"' in answer
    assert b"within the 0.5 s that LOSPMM_UPLOAD_SECONDS allows" in answer


def test_uploads_are_bounded_together(
    shared: TestClient, monkeypatch: pytest.MonkeyPatch, set_environment: Callable[[str, object], None]
) -> None:
    """One that is being read counts until it is refused; with a length, without, and as a form."""
    set_environment("LOSPMM_MAX_UPLOADS_BYTES", 1000)
    set_environment("LOSPMM_MAX_UPLOAD_BYTES", 10_000)
    read, begun, go_on = api.read_request, threading.Event(), threading.Event()

    def slow(files: Received, query: KernelQuery) -> Request:
        begun.set()
        assert go_on.wait(60)
        return read(files, query)

    assert shared.post(POST, content=bytes(2000)).status_code == 422
    monkeypatch.setattr(api, "read_request", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shared.post, POST, content=iter([bytes(800)]))
        try:
            assert begun.wait(60)
            for body in ({"content": bytes(300)}, {"content": iter([bytes(300)])}, {"files": {"matrix": bytes(300)}}):
                refused = shared.post(POST, **body)  # type: ignore[arg-type]
                assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
                assert "the service holds 800 bytes of other uploads now" in refused.json()["detail"]
                assert refused.headers["retry-after"] == "2"
            assert shared.post(POST, content=bytes(10_001)).status_code == 413  # no retry helps
        finally:
            go_on.set()
        assert first.result(60).status_code == 422
    assert shared.post(POST, content=npy_file()).status_code == 201
    assert shared.app.state.uploads.held == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [POST, POST.replace("kernels", "models"), "/jobs", "/models"])
def test_a_large_body_is_refused_unread_where_no_job_is_taken(
    idle_client: TestClient, set_environment: Callable[[str, object], None], path: str
) -> None:
    set_environment("LOSPMM_MAX_JOBS", 1)
    assert idle_client.post(POST.replace("wait=60", "wait=0"), content=npy_file()).status_code == 202
    read = []

    def body() -> Iterator[bytes]:
        read.append(path)
        yield bytes(SMALL_BYTES + 1)

    refused = idle_client.post(path, content=body(), headers={"Content-Length": f"{SMALL_BYTES + 1}"})
    assert (refused.status_code, refused.json()["type"]) == (429, "/problems/busy")
    assert "1 jobs are under way" in refused.json()["detail"]
    again = idle_client.post(POST.replace("wait=60", "wait=0"), content=npy_file())
    assert again.status_code == 202  # it joins its job


def test_a_request_that_there_is_no_memory_for(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Request:
        raise MemoryError

    monkeypatch.setattr(api, "read_request", refuse)
    answer = shared.post(POST, content=npy_file())
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
    assert answer.headers["retry-after"] == "2"


def test_small_uploads_pass_large_ones(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, set_environment: Callable[[str, object], None]
) -> None:
    """Those that take seconds, among them each that is refused in the end."""
    set_environment("LOSPMM_MAX_UPLOAD_BYTES", 16 << 20)
    read, begun, go_on = api.read_request, threading.Event(), threading.Event()

    def slow(files: Received, query: KernelQuery) -> Request:
        if files.size > SMALL_BYTES:
            begun.set()
            assert go_on.wait(60)
        return read(files, query)

    monkeypatch.setattr(api, "read_request", slow)
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(client.post, POST, content=bytes(SMALL_BYTES + 1)) for _ in range(4)]
        try:
            assert begun.wait(60)
            assert client.post(POST, content=npy_file()).status_code == 201
            assert client.post(POST, files={"matrix": ("W.npy", npy_file())}).status_code == 201
            assert not any(one.done() for one in large)
        finally:
            go_on.set()
        assert [one.result(60).status_code for one in large] == [422] * 4


@pytest.mark.parametrize("body", [{"content": b"\x1f\x8b"}, {"files": {"matrix": ("W.npy", b"\x1f\x8b")}}])
def test_a_compressed_body(shared: TestClient, body: dict[str, Any]) -> None:
    for path in (POST, POST.replace("kernels", "models")):
        refused = shared.post(path, headers={"Content-Encoding": "gzip"}, **body)
        assert (refused.status_code, refused.json()["type"]) == (415, "/problems/encoded-body")


def test_a_body_with_two_lengths_ends_the_connection() -> None:
    """A proxy that believes the other one would take the rest for the next request, of somebody else."""
    head = f"POST {POST} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(workers=0) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(f"{head}4\r\nabcd\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (answer.count(b"HTTP/1.1"), answer.count(b"/problems/bad-body")) == (1, 1)


@pytest.mark.parametrize("path", ["/v1/jobs/", "/healthz/", "/docs/"])
def test_no_answer_leads_to_the_host_that_was_named(shared: TestClient, path: str) -> None:
    answer = shared.get(path, headers={"Host": "localhost:9999"}, follow_redirects=False)
    assert (answer.status_code, "location" in answer.headers) == (404, False)
