"""HEAD answers as GET does, without the body."""

import socket

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import npy_file
from tests.server.served import served

FORM = {"matrix": ("W.npy", npy_file())}

#: What each request has of its own.
OWN = ("x-request-id", "date")


def heads_of(client: TestClient, method: str, path: str) -> tuple[int, dict[str, str]]:
    answer = client.request(method, path, headers={"Accept": "*/*"})
    assert method == "GET" or not answer.content
    return answer.status_code, {name: value for name, value in answer.headers.items() if name not in OWN}


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/readyz", "/v1/jobs", "/openapi.json", "/docs", "/", "/v1/jobs?limit=0", "/nowhere", "/v1/kernels",
     f"/v1/jobs/{'0' * 64}", f"/v1/jobs/{'0' * 64}/events", "/jobs/xyz"],
)  # fmt: skip
def test_head_is_get_without_a_body(shared: TestClient, path: str) -> None:
    status, heads = heads_of(shared, "HEAD", path)
    assert (status, heads) == heads_of(shared, "GET", path)
    assert int(heads["content-length"]) > 0


def test_the_files_of_a_kernel(client: TestClient) -> None:
    url = client.post("/v1/kernels?n=128&device=h200&wait=60", files=FORM).headers["location"]
    for part in ("", "/cubin", "/source", "/matrix"):
        status, heads = heads_of(client, "HEAD", url + part)
        assert (status, heads) == heads_of(client, "GET", url + part)
        unchanged = client.head(url + part, headers={"If-None-Match": heads["etag"]})
        assert (status, unchanged.status_code) == (200, 304)


def test_events_that_would_go_on_for_as_long_as_a_job_waits(idle_client: TestClient) -> None:
    job = idle_client.post("/v1/kernels?n=128&device=h200&wait=0", files=FORM).headers["location"]
    answer = idle_client.head(f"{job}/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_path_says_that_it_has_head(shared: TestClient) -> None:
    assert shared.delete("/healthz").headers["allow"] == "GET, HEAD"
    assert shared.head("/v1/kernels").headers["allow"] == "POST"


def test_it_is_counted_as_head_of_its_route(idle_client: TestClient) -> None:
    idle_client.head("/v1/jobs")
    assert 'lospmm_requests_total{method="HEAD",route="/v1/jobs",status="200"} 1.0' in idle_client.get("/metrics").text


def test_openapi_says_nothing_of_it(shared: TestClient) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    operations = [(method, operation["operationId"]) for path in paths.values() for method, operation in path.items()]
    assert not [method for method, _ in operations if method == "head"]
    assert len({identity for _, identity in operations}) == len(operations)


def test_as_a_load_balancer_asks() -> None:
    """Bytes on a connection that is kept: nothing follows the head but the next answer."""
    with served(workers=0) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        ask = f"{{}} /healthz HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: {{}}\r\n\r\n"
        connection.sendall(ask.format("HEAD", "keep-alive").encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += connection.recv(65536)
        connection.sendall(ask.format("GET", "close").encode())
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"content-length: 15\r\n" in answer
    assert rest.startswith(b"HTTP/1.1 200")
    assert rest.endswith(b'\r\n\r\n{"status":"ok"}')
