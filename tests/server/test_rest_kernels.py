"""From a posted matrix to the files of its kernel."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import save as save_tensors
from starlette.testclient import TestClient

from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm_server import shelf
from lospmm_server.disk import Disk, Landmark
from lospmm_server.schemas import Kernel
from lospmm_server.service import Service
from tests.fixtures.files import saved, smtx
from tests.server.conftest import client_of, new_service, npy_file, weights

POST = "/v1/kernels?n=128&device=h200&wait=60"
FORM = {"matrix": ("W.npy", npy_file())}
BINARY = {"Accept": "application/octet-stream"}


def test_a_form_gives_the_manifest_with_digest_and_links(shared: TestClient) -> None:
    answer = shared.post(POST, files=FORM)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/json"
    kernel = answer.json()
    TypeAdapter(Kernel).validate_python(kernel)  # what OpenAPI promises
    assert kernel["n"] == 128
    assert kernel["device"] == "h200"
    assert shared.post(POST.replace("h200", "H200"), files=FORM).json() == kernel
    assert kernel["verified"]["on"] == "cpu"
    assert kernel["fingerprint"] == from_dense(weights()).fingerprint
    assert answer.headers["location"] == f"/v1/kernels/{kernel['digest']}" == kernel["links"]["self"]


@pytest.mark.parametrize("content_type", ["application/octet-stream", "application/x-www-form-urlencoded", None])
def test_a_raw_body_is_the_same_whatever_it_is_called(shared: TestClient, content_type: str | None) -> None:
    expected = shared.post(POST, files=FORM).json()
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = shared.post(POST, content=npy_file(), headers=headers)
    assert answer.status_code == 201
    assert answer.json() == expected


def test_the_cubin_itself(shared: TestClient) -> None:
    answer = shared.post(POST, files=FORM, headers=BINARY)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content.startswith(b"\x7fELF")
    kernel = shared.get(answer.headers["location"]).json()
    assert hashlib.sha256(answer.content).hexdigest() == kernel["cubin_sha256"]
    assert answer.headers["etag"] == f'"{kernel["cubin_sha256"]}"'
    assert answer.headers["content-disposition"] == f'attachment; filename="{kernel["name"]}.cubin"'


def test_a_product_that_is_left_to_cublas_has_a_cubin_too(shared: TestClient) -> None:
    """By forecast here: few zeros, and 16 bits."""
    few_zeros = saved(np.save, (np.random.default_rng(0).random((256, 192)) < 0.8).astype(np.float32))
    url = "/v1/kernels?n=512&device=h200&wait=60&dtype=float16&families=csr,dense&verify=none"
    kernel = shared.post(url, content=few_zeros).json()
    TypeAdapter(Kernel).validate_python(kernel)
    assert (kernel["family"], kernel["cubin_family"]) == ("dense", "csr")
    assert kernel["dense"]["forecast_micros"] < kernel["search"]["estimated_micros"]
    assert shared.get(kernel["links"]["cubin"]).content.startswith(b"\x7fELF")
    assert shared.get(kernel["links"]["matrix"]).status_code == 200  # which cuBLAS is given
    assert "in the cubin csr" in shared.get(f"/kernels/{kernel['digest']}").text


def test_the_files_of_a_kernel(shared: TestClient) -> None:
    kernel = shared.post(POST, files=FORM).json()
    links = kernel["links"]
    assert shared.get(links["self"]).json() == kernel
    assert hashlib.sha256(shared.get(links["cubin"]).content).hexdigest() == kernel["cubin_sha256"]
    source = shared.get(links["source"])
    assert source.headers["content-type"] == "text/plain; charset=utf-8"
    assert source.text.startswith(f"// {kernel['name']} for sm_90: the tiles")
    lines = [json.loads(line) for line in shared.get(links["tuning"]).text.splitlines()]
    assert len(lines) == kernel["search"]["shortlisted"]
    assert (lines[0]["rows"], lines[0]["cols"]) == (kernel["tile"]["rows"], kernel["tile"]["cols"])


@pytest.mark.parametrize("link", ["self", "cubin", "source", "tuning"])
def test_what_a_client_has_is_not_sent_again(shared: TestClient, link: str) -> None:
    url = shared.post(POST, files=FORM).json()["links"][link]
    first = shared.get(url)
    etag = first.headers["etag"]
    assert "immutable" in first.headers["cache-control"]
    for condition in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = shared.get(url, headers={"If-None-Match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert shared.get(url, headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.slow
def test_every_parameter_makes_another_kernel(shared: TestClient) -> None:
    pattern = smtx(weights())
    queries = ("n=128", "n=64", "n=128&seed=1", "n=128&emitter=cuda", "n=128&verify=none", "n=128&dtype=float16")
    kernels = [
        shared.post(f"/v1/kernels?device=a100&wait=60&{query}", content=pattern).raise_for_status().json()
        for query in queries
    ]
    assert len({kernel["digest"] for kernel in kernels}) == len(queries)
    assert [kernel["seed"] for kernel in kernels] == [0, 0, 1, 0, 0, 0]
    assert kernels[3]["emitter"] == "cuda"
    assert kernels[4]["verified"] is None
    assert (kernels[5]["dtype"], kernels[5]["arguments"][1]["type"]) == ("float16", "__half *")
    assert {kernel["arch"] for kernel in kernels} == {"sm_80"}


def test_sums_of_16_bits(shared: TestClient) -> None:
    asked = "/v1/kernels?device=h200&wait=60&n=128&dtype=bfloat16&families=unrolled"
    exact, rounded = (
        shared.post(f"{asked}{more}", content=smtx(weights())).raise_for_status().json()
        for more in ("", "&sums=bfloat16")
    )
    assert (exact["sums"], exact["tile"]["thread_columns"]) == ("float32", 1)
    assert (rounded["sums"], rounded["tile"]["thread_columns"]) == ("bfloat16", 2)
    assert rounded["accuracy"]["sum_rounding"] > exact["accuracy"]["sum_rounding"]


def test_without_options_they_are_what_this_machine_decides(
    shared: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lospmm.tuning.request.own_gpu", lambda: None)
    kernel = shared.post(POST, files=FORM).json()
    assert (kernel["emitter"], kernel["verified"]["on"], kernel["measured"]) == ("sass", "cpu", None)
    assert kernel["search"]["chosen_by"] == "model"
    older = shared.post("/v1/kernels?n=128&device=a100&wait=60", files=FORM).json()
    assert (older["emitter"], older["verified"]["on"]) == ("ptx", "cpu")
    said = shared.post(f"{POST}&emitter=sass&verify=cpu", files=FORM).json()
    assert said["digest"] == kernel["digest"]  # "auto" and what it stands for are the same request
    refused = shared.post(f"{POST}&verify=gpu", files=FORM)
    assert (refused.status_code, refused.json()["type"]) == (400, "/problems/bad-request")
    assert refused.json()["detail"].startswith("verify gpu: h200 is needed, and this machine has no GPU")


def test_tensor_names_the_weight(shared: TestClient) -> None:
    content = save_tensors({"one": weights(1), "two": weights(2)})
    kernel = shared.post(f"{POST}&tensor=two", content=content).json()
    assert kernel["fingerprint"] == from_dense(weights(2)).fingerprint
    refused = shared.post(POST, content=content)
    assert refused.json()["type"] == "/problems/bad-matrix"
    assert "one, two" in refused.json()["detail"]


def test_a_kernel_survives_the_service(client: TestClient) -> None:
    kernel = client.post(POST, files=FORM).json()
    with client_of(new_service()) as other:
        assert other.get(kernel["links"]["self"]).json() == kernel
        assert other.get(f"/v1/jobs/{kernel['digest']}").json()["state"] == "succeeded"


def test_a_damaged_kernel_is_gone(client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "CHECK_SECONDS", -1.0)  # every request looks at the disk
    kernel = client.post(POST, files=FORM).json()
    (service.store.directory("kernel", kernel["digest"]) / "kernel.cubin").write_bytes(b"damaged")
    assert client.get(kernel["links"]["cubin"]).status_code == 404
    assert client.post(POST, files=FORM).status_code == 201
    assert client.get(kernel["links"]["cubin"]).content.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("query", "kind", "status", "says"),
    [
        ("", "bad-parameter", 422, "query n: Field required"),
        ("n=0", "bad-parameter", 422, "query n: Input should be greater"),
        ("n=many", "bad-parameter", 422, "query n: Input should be a valid integer"),
        ("n=1&wait=601", "bad-parameter", 422, "query wait"),
        ("n=1&wait=nan", "bad-parameter", 422, "query wait"),
        ("n=1&seed=-1", "bad-parameter", 422, "query seed"),
        ("n=1&divice=h200", "bad-parameter", 422, "query divice: there is no such parameter (did you mean device?)"),
        ("n=1&" + "&".join(f"x{i}=" for i in range(9)), "bad-parameter", 422, "; and 4 more"),
        ("n=1&n=2&device=h200", "bad-parameter", 422, "query n: is given more than once"),
        ("n=1&device=h2000", "bad-request", 400, "unknown device 'h2000': expected auto or one of v100"),
        ("n=1&device=/etc/passwd.toml", "bad-request", 400, "unknown device"),
        ("n=1&device=h200&emitter=wasm", "bad-request", 400, "emitter 'wasm': choose one of auto, sass, ptx, cuda"),
        ("n=1&device=h200&dtype=int8", "bad-request", 400, "dtype 'int8': choose one of float32, tf32, float16"),
        ("n=1&device=h200&sums=half", "bad-request", 400, "sums 'half': choose one of float32, float16, bfloat16"),
        ("n=1&device=h200&sums=float16", "bad-request", 400, "sums 'float16': with dtype float32 choose float32"),
        ("n=1&device=b200&emitter=sass", "unsupported", 400, "machine code for sm_100: known are sm_90"),
        ("n=1&device=v100", "unsupported", 400, "V100 (sm_70) needs a CUDA 12 toolkit"),
    ],
)
def test_wrong_parameters(shared: TestClient, query: str, kind: str, status: int, says: str) -> None:
    answer = shared.post(f"/v1/kernels?{query}", files=FORM)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["type"], problem["status"], answer.status_code) == (f"/problems/{kind}", status, status)
    assert says in problem["detail"]
    assert "\n" not in problem["detail"]


def test_auto_is_the_gpu_of_the_service(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lospmm_server.uploads.detect_device", lambda: DEVICES["h100"])
    assert shared.post("/v1/kernels?n=16&device=auto", files=FORM).json()["device"] == "h100"


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/json;q=0", "*/*;q=0"])
def test_a_media_type_that_there_is_not(shared: TestClient, accept: str) -> None:
    answer = shared.post(POST, files=FORM, headers={"Accept": accept})
    assert (answer.status_code, answer.json()["type"]) == (406, "/problems/not-acceptable")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", f"/v1/kernels/{'0' * 64}", 404, "not-found"),
        ("GET", f"/v1/kernels/{'0' * 64}/cubin", 404, "not-found"),
        ("GET", f"/v1/jobs/{'0' * 64}", 404, "not-found"),
        ("GET", "/v1/kernels/0123", 422, "bad-parameter"),
        ("GET", f"/v1/kernels/{'G' * 64}/source", 422, "bad-parameter"),
        ("GET", f"/v1/jobs/{'0' * 63}?wait=-1", 422, "bad-parameter"),
        ("GET", "/v1/kernels/..%2F..%2Fetc/tuning", 404, "not-found"),
        ("GET", "/nowhere", 404, "not-found"),
        ("GET", "/v1/kernels", 405, "method-not-allowed"),
        ("DELETE", "/healthz", 405, "method-not-allowed"),
    ],
)
def test_what_there_is_not(shared: TestClient, method: str, path: str, status: int, kind: str) -> None:
    answer = shared.request(method, path)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{kind}")
    assert answer.json()["detail"] not in ("Not Found", "Method Not Allowed")
    assert "pattern" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/jobs?stat=failed", "query stat: there is no such parameter (did you mean state?)"),
        ("/v1/jobs?limit=1&limit=2", "query limit: is given more than once"),
        (f"/v1/jobs/{'0' * 64}?wiat=9", "query wiat: there is no such parameter (did you mean wait?)"),
        (f"/v1/kernels/{'0' * 64}?wait=9", "query wait: there is no such parameter"),
        (f"/v1/jobs/{'0' * 64}/events?%00=", "query \0: there is no such parameter"),
    ],
)
def test_misspelt_parameters_of_what_is_read(shared: TestClient, path: str, says: str) -> None:
    for method in ("GET", "HEAD"):
        answer = shared.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert shared.get(path).json()["detail"] == says


def test_probes_may_ask_with_any_query(shared: TestClient) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert shared.get(f"{path}?time=1&time=2").status_code == 200


def test_a_fault_of_the_service_tells_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_digest: str) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(client.app.state.service.shelf, "find", fail)
    answer = client.get(f"/v1/kernels/{'0' * 64}")
    assert (answer.status_code, answer.json()["type"]) == (500, "/problems/internal")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:8001", "Host": "localhost:8000"},
        {"Origin": "null"},
        *(
            {"Host": host}
            for host in (
                "evil.example",
                "127.0.0.1.evil.example:8000",
                "127.0.0.1@evil.example",
                "a{b.evil.example",
                "evil.example:65536",
                "evil.example:x",
                "[::1",
                "",
            )
        ),
    ],
)
def test_pages_of_other_sites_are_refused(shared: TestClient, headers: dict[str, str]) -> None:
    answer = shared.post(POST, files=FORM, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/forbidden")
    own = {"Sec-Fetch-Site": "same-origin", "Host": "[::1]:8000"}
    for headers in (
        own,
        {"Origin": "http://LocalHost:8000", "Host": "localhost:8000"},
        own | {"Origin": "https://tuner"},
        {"Host": "LOCALHOST:8171"},
    ):
        assert shared.get("/v1/jobs", headers=headers).status_code == 200


def test_a_wrong_setting_is_not_blamed_on_the_client(
    shared: TestClient, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_TOOLKIT", "/nowhere")
    answer = shared.post(POST, files=FORM)
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")


def test_health_and_readiness(
    idle_client: TestClient,
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_environment: Callable[[str, object], None],
) -> None:
    client = idle_client
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    set_environment("LOSPMM_TOOLKIT", "/nowhere")
    (tmp_path / "file").write_text("a file where the cache should be")
    monkeypatch.setattr(service.shelf, "disk", Disk(Landmark.at(tmp_path / "file")))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
    assert "LOSPMM_TOOLKIT: no nvcc in /nowhere/bin" in answer.json()["detail"]
    assert "cannot be written: Not a directory" in answer.json()["detail"]
    assert client.get("/healthz").status_code == 200
