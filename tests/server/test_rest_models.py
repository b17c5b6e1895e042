"""A model as a batch of its layers, and the list of jobs."""

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import save as save_tensors
from starlette.testclient import TestClient

import lospmm
from lospmm.matrix.csr import from_dense
from lospmm.model.onnx_table import table_of_onnx
from lospmm.model.report import read_report
from lospmm_server.schemas import JobList, JobView
from lospmm_server.service import Service
from tests.fixtures.files import npy, safetensors, tensor
from tests.fixtures.onnx_models import onnx_product
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, npy_file, weights

POST = "/v1/models?n=64&device=h200"


def convolution() -> np.ndarray:
    return weights(5).reshape(4, 2, 3, 2)


def two_equal_and_one() -> bytes:
    """Three weights, two of them equal, beside what is none."""
    others = {"bias": np.ones(4, np.float32), "steps": np.ones((2, 2), np.int64)}
    return save_tensors({"fc.0": weights(1), "fc.1": weights(2), "fc.2": weights(1), **others})


def test_every_weight_of_a_file_is_a_layer_and_equal_ones_are_tuned_once(
    client: TestClient, slow_toolkit: SlowToolkit
) -> None:
    slow_toolkit.gate.touch()
    answer = client.post(f"{POST}&wait=60", files={"matrix": ("mlp.safetensors", two_equal_and_one())})
    assert answer.status_code == 201
    job = answer.json()
    TypeAdapter(JobView).validate_python(job)
    assert (job["kind"], job["state"], job["name"], job["error"]) == ("model", "succeeded", "mlp", None)
    assert job["progress"] == {"layers": {"done": 3, "total": 3}}
    layers = {layer["name"]: layer for layer in job["layers"]}
    assert list(layers) == ["fc.0", "fc.1", "fc.2", "bias", "steps"]
    assert [layers[name]["state"] for name in ("bias", "steps")] == ["skipped", "skipped"]
    assert layers["bias"]["skipped"] == "a vector: no kernel of its own"
    assert layers["fc.0"]["kernel"] == layers["fc.2"]["kernel"] != layers["fc.1"]["kernel"]
    assert slow_toolkit.compilations == 2  # a prologue each
    kernel = client.get(layers["fc.1"]["kernel"]).json()
    assert kernel["fingerprint"] == from_dense(weights(2)).fingerprint
    assert [layers["fc.1"][side] for side in ("m", "k", "nnz")] == [kernel[side] for side in ("m", "k", "nnz")]
    assert client.get(answer.headers["location"]).json() == job


def test_weights_that_are_not_pruned_are_skipped(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    slow_toolkit.gate.touch()
    content = save_tensors({"embed": np.ones((4, 12), np.float32), "fc": weights(1)})
    few = "fewer zeros than the 40% of min_sparsity"
    layers = client.post(f"{POST}&wait=60", content=content).json()["layers"]
    assert [(layer["state"], layer["skipped"]) for layer in layers] == [("skipped", few), ("succeeded", None)]
    layers = client.post(f"{POST}&wait=60&min_sparsity=0", content=content).json()["layers"]
    assert [layer["state"] for layer in layers] == ["succeeded", "succeeded"]
    refused = client.post(POST, content=save_tensors({"embed": np.ones((4, 12), np.float32)}))
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith(f"no layer is asked for: embed: {few}; is the model pruned")


def test_the_shards_of_a_model(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    """Also with one weight; one that cannot be read fails alone, and a matrix file is a layer beside them."""
    slow_toolkit.gate.touch()
    shards = [("1", two_equal_and_one()), ("2", save_tensors({"head": weights(3)})), ("3", two_equal_and_one()[:-1])]
    files = [("matrix", (f"{name}.safetensors", content)) for name, content in shards]
    job = client.post(f"{POST}&wait=60", files=[*files, ("matrix", ("last.npy", npy_file()))]).json()
    states = {layer["name"]: layer["state"] for layer in job["layers"]}
    assert list(states) == ["fc.0", "fc.1", "fc.2", "head", "3", "last", "bias", "steps"]
    assert [name for name, state in states.items() if state == "succeeded"] == ["fc.0", "fc.1", "fc.2", "head", "last"]
    assert (job["state"], states["3"]) == ("partial", "failed")


def test_an_onnx_model_with_its_layer_table(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    slow_toolkit.gate.touch()
    content = onnx_product(batch=8)
    table = table_of_onnx(content).to_toml().encode()
    files = {"matrix": ("net.onnx", content), "layers": ("layers.toml", table)}
    answer = client.post("/v1/models?device=h200&wait=60", files=files)
    assert (answer.status_code, answer.json()["name"]) == (201, "net"), answer.text
    (layer,) = answer.json()["layers"]
    assert [layer[key] for key in ("name", "m", "k")] == ["fc", 16, 10]
    assert client.get(layer["kernel"]).json()["n"] == 8
    damaged = client.post("/v1/models?n=8&device=h200", files={"matrix": ("net.onnx", content[:-9])})
    assert damaged.status_code == 422 and "truncated or damaged ONNX model" in damaged.json()["detail"]


def test_several_columns(client: TestClient, slow_toolkit: SlowToolkit, tmp_path: Path) -> None:
    """A row and a job for each layer and N, the same as of each N alone; the zip is the folder of tune-model."""
    slow_toolkit.gate.touch()
    content = two_equal_and_one()
    job = client.post("/v1/models?n=8,64,8&device=h200&name=net&wait=60", content=content).json()
    TypeAdapter(JobView).validate_python(job)
    assert (job["state"], job["progress"]) == ("succeeded", {"layers": {"done": 6, "total": 6}})
    rows = [(row["name"], row["n"]) for row in job["layers"]]
    assert rows == [*((f"fc.{at}", n) for at in range(3) for n in (8, 64)), ("bias", None), ("steps", None)]
    alone = client.post(f"{POST}&wait=60", content=content).json()
    assert [row["kernel"] for row in job["layers"] if row["n"] == 64] == [row["kernel"] for row in alone["layers"][:3]]
    with zipfile.ZipFile(io.BytesIO(client.get(job["links"]["archive"]).content)) as archive:
        archive.extractall(tmp_path)
    kernels = lospmm.load_model(tmp_path / "net")
    assert {name: kernel.manifest["n"] for name, kernel in kernels.items()} == {
        f"{name}@{n}": n for name, n in rows if n is not None
    }
    assert [(total.n, total.layers) for total in read_report(tmp_path / "net").totals] == [(8, 3), (64, 3)]
    table = b'[layers."fc.*"]\nn = [64, 8]\n\n[layers.steps]\nskip = "none"'
    files = {"matrix": ("net.safetensors", content), "layers": ("layers.toml", table)}
    again = client.post("/v1/models?device=h200&wait=60", files=files).json()
    assert [row["kernel"] for row in again["layers"]] == [row["kernel"] for row in job["layers"]]


def test_all_kernels_of_a_model_as_one_zip(client: TestClient, slow_toolkit: SlowToolkit, tmp_path: Path) -> None:
    """It is the folder that tune-model writes, with every layer in its report; the same bytes each time."""
    content = two_equal_and_one()
    waiting = client.post(f"{POST}&name=a%20net", content=content).json()
    early = client.get(f"{waiting['links']['self']}/archive")
    assert (early.status_code, waiting["links"]["archive"]) == (409, None)
    slow_toolkit.gate.touch()
    job = client.get(f"{waiting['links']['self']}?wait=60").json()
    answer = client.get(job["links"]["archive"])
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    assert re.fullmatch(r'attachment; filename="a_net-[0-9a-f]{16}\.zip"', answer.headers["content-disposition"])
    assert client.get(job["links"]["archive"]).content == answer.content
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "zip")
    (folder,) = (tmp_path / "zip").iterdir()
    kernels = lospmm.load_model(folder)
    assert {name: kernel.manifest["fingerprint"] for name, kernel in kernels.items()} == {
        name: from_dense(weights(seed)).fingerprint for name, seed in (("fc.0", 1), ("fc.1", 2), ("fc.2", 1))
    }
    layers = {layer.name: layer for layer in read_report(folder).layers}
    assert [layers[name].skipped for name in ("bias", "steps")] == [
        "a vector: no kernel of its own",
        "I64 with 2 axes: weights are F16, BF16, F32, F64, with 2 to 4 axes",
    ]
    assert {"fc.0", "fc.1", "fc.2", "report.json", "kernels.tsv"} == {path.name for path in folder.iterdir()}
    kernel = client.get(f"/v1/jobs/{job['layers'][0]['kernel'].rpartition('/')[2]}/archive")
    assert kernel.status_code == 404 and "is no model" in kernel.json()["detail"]


def test_the_zip_says_what_failed_and_what_was_lost(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    slow_toolkit.gate.touch()
    files = [("matrix", ("good.npy", npy_file())), ("matrix", ("bad.npy", b"\x93NUMPY\x09\x00\x10\x00"))]
    job = client.post(f"{POST}&wait=60", files=files).json()
    assert job["state"] == "partial"
    with zipfile.ZipFile(io.BytesIO(client.get(job["links"]["archive"]).content)) as archive:
        report = json.loads(archive.read(next(name for name in archive.namelist() if name.endswith("report.json"))))
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert (layers["good"]["error"], layers["bad"]["error"]["type"]) == (None, "BadMatrix")
    assert (report["n"], report["device"], layers["bad"]["error"]["exit_code"]) == (64, "h200", 2)


def test_posted_twice_it_is_the_same_job(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    first = client.post(POST, content=two_equal_and_one())
    assert (first.status_code, first.json()["state"]) in ((202, "queued"), (202, "running"))
    assert int(first.headers["retry-after"]) > 0
    again = client.post(POST, content=two_equal_and_one())
    assert again.json()["id"] == first.json()["id"]
    assert client.post(f"{POST}&name=other", content=two_equal_and_one()).json()["id"] != first.json()["id"]
    slow_toolkit.gate.touch()
    assert client.get(f"{first.headers['location']}?wait=60").json()["state"] == "succeeded"
    done = client.post(POST, content=two_equal_and_one())
    assert (done.status_code, done.json()["state"]) == (201, "succeeded")
    assert slow_toolkit.compilations == 2


def test_files_are_layers_by_name_and_a_bad_one_fails_alone(client: TestClient) -> None:
    files = [("conv.npy", npy_file(1)), ("bad.npy", b"not a matrix"), ("../up/fc.v2.npz.npy", npy_file(2))]
    answer = client.post(f"{POST}&wait=60&name=net", files=[("matrix", file) for file in files])
    assert answer.status_code == 201
    job = answer.json()
    assert (job["state"], job["name"]) == ("partial", "net")
    assert job["error"]["type"] == "/problems/layers-failed"
    assert "1 of 3 layers have no kernel: bad: bad.npy: does not begin as a .npy file does" in job["error"]["detail"]
    assert [(layer["name"], layer["state"]) for layer in job["layers"]] == [
        ("conv", "succeeded"),
        ("bad", "failed"),
        ("fc.v2.npz", "succeeded"),
    ]
    assert job["layers"][1]["error"]["type"] == "/problems/bad-matrix"
    assert (job["layers"][1]["job"], job["layers"][1]["m"]) == (None, None)


def test_a_layer_beyond_its_type_fails_alone(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    slow_toolkit.gate.touch()
    content = save_tensors({"fine": weights(1), "large": weights(2) * np.float32(1e6)})
    answer = client.post(f"{POST}&dtype=float16&families=csr&verify=none&wait=60", content=content)
    fine, large = sorted(answer.json()["layers"], key=lambda layer: layer["name"])
    assert (fine["state"], large["state"]) == ("succeeded", "failed")
    assert large["error"]["type"].endswith("bad-matrix") and "float16" in large["error"]["detail"]


def test_a_convolution_is_its_matrix(client: TestClient) -> None:
    content = save_tensors({"conv": convolution(), "nan": np.full((2, 2), np.nan, np.float32)})
    job = client.post(f"{POST}&wait=60", content=content).json()
    conv, nan = sorted(job["layers"], key=lambda layer: layer["name"])
    assert (conv["m"], conv["k"], conv["state"]) == (4, 12, "succeeded")
    assert client.get(conv["kernel"]).json()["fingerprint"] == from_dense(weights(5)).fingerprint
    assert (nan["state"], "not a finite float32" in nan["error"]["detail"]) == ("failed", True)


@pytest.mark.parametrize(
    ("content", "status", "kind", "says"),
    [
        (b"", 422, "bad-matrix", "is empty"),
        (b"GIF89a", 422, "bad-matrix", "its first bytes are"),
        (two_equal_and_one()[:-1], 422, "bad-matrix", "truncated or damaged safetensors"),
        (save_tensors({"bias": np.ones(4, np.float32)}), 422, "bad-matrix", "holds no weight"),
        (safetensors({"../w": tensor("F32", [1, 1], 0, 4)}, bytes(4)), 422, "bad-matrix", "outside a directory"),
        (npy((2**16, 2**17)), 422, "bad-matrix", ""),
        (save_tensors({"nan": np.full((2, 2), np.nan, np.float32)}), 422, "bad-matrix", "not a finite float32"),
    ],
)
def test_a_file_of_which_nothing_can_be_used(
    idle_client: TestClient, content: bytes, status: int, kind: str, says: str
) -> None:
    for body in ({"content": content}, {"files": {"matrix": ("W", content)}}):
        answer = idle_client.post(POST, **body)
        assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{kind}")
        assert says in answer.json()["detail"]
    assert idle_client.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        ([("other", ("W.npy", npy_file()))], 400, "expected 1 to 2000 files, in the field 'matrix'"),
        ([("matrix", ("a/W.npy", npy_file())), ("matrix", ("b/W.npy", npy_file()))], 400, "two layers are called 'W'"),
    ],
)
def test_hostile_forms(shared: TestClient, files: list[tuple[str, object]], status: int, says: str) -> None:
    answer = shared.post(POST, files=files)
    assert answer.status_code == status
    assert says in answer.json()["detail"]


@pytest.mark.parametrize(
    ("query", "status", "kind"),
    [
        ("", 400, "bad-request"),
        ("n=64&tensor=fc", 422, "bad-parameter"),
        ("n=64&device=h200&name=", 422, "bad-parameter"),
        ("n=64&device=/etc/passwd", 400, "bad-request"),
        ("n=16777217&device=h200", 400, "bad-request"),
        ("n=64,16777217&device=h200", 400, "bad-request"),
        ("n=0&device=h200", 422, "bad-parameter"),
        ("n=1,,8&device=h200", 422, "bad-parameter"),
        ("n=1,8&conv=1x3x4x4,1x1&device=h200", 400, "bad-request"),
    ],
)
def test_wrong_parameters(shared: TestClient, query: str, status: int, kind: str) -> None:
    answer = shared.post(f"/v1/models?{query}", content=two_equal_and_one())
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{kind}")


def test_too_many_layers_for_the_queue(idle_client: TestClient, set_environment: Callable[[str, object], None]) -> None:
    set_environment("LOSPMM_MAX_JOBS_PER_KEY", 2)
    files = [("matrix", (f"{seed}.npy", npy_file(seed))) for seed in (1, 2, 3)]
    refused = idle_client.post(POST, files=files)
    assert (refused.status_code, refused.json()["type"]) == (400, "/problems/bad-request")
    assert idle_client.post(POST, files=files[:2]).status_code == 202
    busy = idle_client.post(POST, files=files[2:])
    assert (busy.status_code, busy.json()["type"]) == (429, "/problems/busy")
    assert "jobs of this key are under way" in busy.json()["detail"]


def test_of_a_refused_model_nothing_is_kept(
    service: Service, idle_client: TestClient, set_environment: Callable[[str, object], None]
) -> None:
    idle_client.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file(1))
    held = [entry.key for entry in service.store.entries()]
    files = [("matrix", (f"{seed}.npy", npy_file(seed))) for seed in (1, 2, 3, 4)]
    assert idle_client.post(f"{POST}&biases=true", files=files).status_code == 400
    set_environment("LOSPMM_MAX_JOBS_PER_KEY", 2)
    assert idle_client.post(POST, files=files).status_code == 400  # which never fits
    assert idle_client.post(POST, files=files[:3]).status_code == 429
    assert [entry.key for entry in service.store.entries()] == held


def test_a_model_that_is_cancelled(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    files = [("matrix", (f"{seed}.npy", npy_file(seed))) for seed in (1, 2)]
    model = client.post(POST, files=files).headers["location"]
    shared = client.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file(2)).headers["location"]
    wait_until(lambda: slow_toolkit.compilations)
    cancelled = client.delete(model).json()
    assert cancelled["state"] == "cancelled"
    first = cancelled["layers"][0]["job"]
    assert client.get(f"{first}?wait=20").json()["state"] == "cancelled"
    slow_toolkit.gate.touch()
    assert client.get(f"{shared}?wait=60").json()["state"] == "succeeded"  # somebody asked for it alone
    assert client.get(model).json()["state"] == "cancelled"
    assert client.post(f"{POST}&wait=60", files=files).json()["state"] == "succeeded"


def test_jobs_are_listed_by_pages_and_states(idle_client: TestClient) -> None:
    assert idle_client.get("/v1/jobs").json() == {"jobs": [], "next": None}
    posted = [
        idle_client.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file(seed)).json()["id"]
        for seed in (1, 2, 3)
    ]
    posted.append(idle_client.post(POST, content=two_equal_and_one()).json()["id"])
    idle_client.delete(f"/v1/jobs/{posted[1]}")
    first = idle_client.get("/v1/jobs?limit=3").json()
    TypeAdapter(JobList).validate_python(first)
    rest = idle_client.get(f"/v1/jobs?limit=3&cursor={first['next']}").json()
    assert [job["id"] for job in first["jobs"] + rest["jobs"]] == posted[::-1]
    assert idle_client.get("/v1/jobs?limit=4").json()["next"] is None
    assert (rest["next"], [job["layers"] for job in first["jobs"]]) == (None, [None] * 3)
    cancelled = idle_client.get("/v1/jobs?state=cancelled").json()["jobs"]
    assert [job["id"] for job in cancelled] == [posted[1]]
    for wrong in ("state=done", "cursor=x", "cursor=-1", "limit=0", "limit=51", f"cursor={'9' * 19}"):
        answer = idle_client.get(f"/v1/jobs?{wrong}")
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/bad-parameter"), wrong


def events(text: str) -> list[tuple[int, str, dict[str, object]]]:
    """The events of a stream: id, kind and data."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_events_from_the_beginning_to_the_end_and_from_anywhere(client: TestClient, slow_toolkit: SlowToolkit) -> None:
    job = client.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file()).json()
    wait_until(lambda: client.get(job["links"]["self"]).json()["stage"] == "compile")
    with client.stream("GET", job["links"]["events"]) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        slow_toolkit.gate.touch()
        stream.read()
        found = events(stream.text)
    kinds = [kind for _, kind, _ in found]
    assert (kinds[:2], kinds[-2:]) == (["queued", "running"], ["succeeded", "state"])
    assert "progress" in kinds
    ids = [number for number, _, _ in found]
    assert ids == sorted(ids)
    data = found[-2][2]
    assert (data["job"], data["cache"], data["nnz"]) == (job["id"], "miss", np.count_nonzero(weights()))
    later = client.get(job["links"]["events"], headers={"Last-Event-ID": str(ids[0])})
    assert [kind for _, kind, _ in events(later.text)] == ["running", "succeeded", "state"]
    nothing = client.get(job["links"]["events"], headers={"Last-Event-ID": str(ids[-1])})
    assert (nothing.status_code, nothing.content) == (204, b"")
    for odd in ("x", "-1", "9" * 30, "\u0663".encode()):
        assert client.get(job["links"]["events"], headers={"Last-Event-ID": odd}).status_code in (200, 204)
    assert client.get(f"/v1/jobs/{'0' * 64}/events").status_code == 404


def test_events_of_a_model_name_its_layers(client: TestClient) -> None:
    job = client.post(f"{POST}&wait=60", content=two_equal_and_one()).json()
    found = events(client.get(job["links"]["events"]).text)
    ended = {data["layer"] for _, kind, data in found if kind == "succeeded"}
    assert len(ended) == 2  # of two equal ones, either
    assert ended < {"fc.0", "fc.1", "fc.2"}
    assert (found[-1][1], found[-1][2]["state"]) == ("state", "succeeded")


def test_a_kernel_of_the_command_line_has_a_job_and_an_end(client: TestClient) -> None:
    """Tuned with the same cache, unknown to the database."""
    kernel = client.post("/v1/kernels?n=64&device=h200&wait=60", content=npy_file()).json()
    client.app.state.service.database.engine.dispose()
    with client.app.state.service.database.write() as connection:
        for table in ("events", "kernels"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    job = client.get(f"/v1/jobs/{kernel['digest']}").json()
    assert (job["state"], job["created"], job["links"]["kernel"]) == ("succeeded", None, kernel["links"]["self"])
    stream = client.get(job["links"]["events"])
    assert "event: state" in stream.text
    assert client.delete(job["links"]["self"]).json()["state"] == "succeeded"


def test_metrics_count_what_workers_did(client: TestClient) -> None:
    client.get("/metrics")
    post = "/v1/kernels?n=64&device=h200&wait=60"
    assert [client.post(post, content=npy_file()).status_code for _ in range(2)] == [201, 201]
    page = client.get("/metrics").text
    for line in (
        'lospmm_jobs_ended_total{outcome="tuned"} 1.0',
        'lospmm_artifact_requests_total{cache="hit"} 1.0',
        'lospmm_artifact_requests_total{cache="miss"} 1.0',
        'lospmm_queue_jobs{state="queued"} 0.0',
        'lospmm_requests_total{method="POST",route="/v1/kernels",status="201"} 2.0',
    ):
        assert line in page


@pytest.mark.usefixtures("either_database")
def test_a_weight_with_a_name_that_no_table_holds(idle_client: TestClient) -> None:
    """PostgreSQL refuses what is longer than its column, SQLite does not look."""
    for length, status in ((1000, 202), (1001, 400)):
        name = "w" * length
        answer = idle_client.post(POST, files={"matrix": ("net.safetensors", save_tensors({name: weights()}))})
        assert answer.status_code == status, answer.text
    assert answer.json()["detail"] == f"the name of a weight, {'w' * 80!r}..., has 1001 characters; at most 1000"


@pytest.mark.usefixtures("either_database")
def test_a_model_with_a_name_that_grows_when_it_is_written_out(idle_client: TestClient) -> None:
    answer = idle_client.post(f"{POST}&name={'%07' * 200}", files={"matrix": ("w.npy", npy_file())})
    assert (answer.status_code, answer.json()["name"]) == (202, "\\x07" * 50)
