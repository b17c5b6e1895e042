"""The pages on the real service: what a form posts is tuned, and what workers write down is shown."""

from collections.abc import Callable, Iterator

import numpy as np
from httpx2 import Response
from safetensors.numpy import save as save_tensors
from starlette.testclient import TestClient

from tests.fixtures.files import saved
from tests.server.conftest import npy_file, weights
from tests.server.page_reader import BROWSER, page

DEVICE = {"device": "h200"}
FORM = {"n": "64", **DEVICE}


def post(client: TestClient, content: bytes, status: int = 303) -> str:
    """The path of the job's page."""
    files = {"matrix": ("W.npy", content)}
    response = client.post("/jobs", files=files, data=FORM, headers=BROWSER, follow_redirects=False)
    assert response.status_code == status, response.text
    return response.headers.get("location", "")


def test_a_posted_matrix_waits_and_is_listed(idle_client: TestClient) -> None:
    idle_client.headers.update(BROWSER)
    path = post(idle_client, npy_file())
    waiting = page(idle_client, path)
    assert "Queued." in waiting.text and "Matrix A 4 x 12" in waiting.text and "Columns of B 64" in waiting.text
    assert "Kernel W queued" in page(idle_client, "/").text
    assert "Kernel W queued" in page(idle_client, "/?state=queued").text
    assert "Kernel W" not in page(idle_client, "/?state=failed").text
    idle_client.delete(f"/v1{path}")
    assert "Cancelled." in page(idle_client, path).text


def test_a_posted_matrix_becomes_a_kernel_with_its_space(client: TestClient) -> None:
    client.headers.update(BROWSER)
    path = post(client, npy_file())
    assert client.get(f"/v1{path}", params={"wait": 60}).json()["state"] == "succeeded"
    found = page(client, path)
    assert "Succeeded." in found.text and "the winner" in found.text and "Verified on the CPU" in found.text
    for link in found.all("a"):
        assert client.get(str(link["href"])).status_code == 200, link
    assert post(client, npy_file()) == path


def test_a_model_shows_its_layers_with_forecasts(client: TestClient) -> None:
    """No GPU is there to time them."""
    client.headers.update(BROWSER)
    files = [("matrix", ("good.npy", saved(np.save, weights(1)))), ("matrix", ("bad.npy", b"\x93NUMPY"))]
    response = client.post("/v1/models", params={"n": 64, "device": "h200", "name": "two", "wait": 60}, files=files)
    assert response.status_code in (200, 201, 202), response.text
    good, bad = response.json()["layers"]
    forecast = client.get(good["kernel"]).json()["search"]["estimated_micros"]
    assert (good["estimated_micros"], bad["estimated_micros"]) == (forecast, None)
    text = page(client, f"/jobs/{response.json()['id']}").text
    assert "Model two" in text and "good" in text and "succeeded 4 x 12" in text
    assert f"not timed predicted: {forecast:.2f} \u00b5s" in text
    assert "bad" in text and "failed" in text
    assert "Model two partial 2 of 2 layers" in page(client, "/").text


def test_what_only_begins_as_an_id_is_none(idle_client: TestClient) -> None:
    for path in ("jobs", "kernels"):
        assert idle_client.get(f"/{path}/{'0' * 64}%0A", headers=BROWSER).status_code == 404


def test_a_damaged_matrix_is_refused_with_a_page(client: TestClient) -> None:
    response = client.post("/jobs", files={"matrix": ("W.npy", b"\x93NUMPY")}, data=FORM, headers=BROWSER)
    assert (response.status_code, "The matrix file cannot be used" in response.text) == (422, True)


def test_proxies_are_for_services_whose_workers_have_the_gpu(
    idle_client: TestClient, set_environment: Callable[[str, object], None]
) -> None:
    """By the routes and the forms, of a matrix and of a model, before anything is queued."""
    asked, matrix, model = {**FORM, "trials": "proxy"}, npy_file(), save_tensors({"a": weights(1), "b": weights(2)})

    def answers() -> Iterator[Response]:
        for path, content in (("kernels", matrix), ("models", model)):
            yield idle_client.post(f"/v1/{path}", params={**asked, "wait": 0}, files={"matrix": ("w", content)})
        for path, content in (("jobs", matrix), ("models", model)):
            given = {"files": {"matrix": ("w", content)}, "data": asked, "headers": BROWSER}
            yield idle_client.post(f"/{path}", **given, follow_redirects=False)

    for answer in answers():
        assert answer.status_code == 400, answer.text
        assert "trials proxy: nothing is timed; use measure auto on a machine with h200" in answer.text
    assert idle_client.get("/v1/jobs").json()["jobs"] == []
    set_environment("LOSPMM_WORKER_GPU", "h200")
    assert [answer.status_code for answer in answers()] == [202, 202, 303, 303]


def test_a_model_with_a_layer_table_is_posted(client: TestClient) -> None:
    """As POST /v1/models takes it; without a table one N is for all layers."""
    client.headers.update(BROWSER)
    tensors = {"a.weight": weights(1), "b.weight": weights(2)}
    table = b'[layers."a.weight"]\nn = 24\n\n[layers."b.weight"]\nskip = "stays dense"'
    files = {"matrix": ("two.safetensors", save_tensors(tensors)), "layers": ("layers.toml", table)}
    answer = client.post("/models", files=files, data={"n": "", **DEVICE}, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    path = answer.headers["location"]
    assert client.get(f"/v1{path}", params={"wait": 60}).json()["state"] == "succeeded"
    text = page(client, path).text
    assert "Model two" in text and "stays dense" in text and "skipped" in text
    files["layers"] = ("", b"")  # as a browser posts a field without a file
    answer = client.post("/models", files=files, data={"n": "8", "dtype": "float16", **DEVICE}, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    assert [layer["skipped"] for layer in client.get(f"/v1{answer.headers['location']}").json()["layers"]] == [None] * 2
    answer = client.post("/models", files=files, data={"n": "1,8", **DEVICE}, follow_redirects=False)
    path = answer.headers["location"]
    rows = client.get(f"/v1{path}", params={"wait": 60}).json()["layers"]
    text = page(client, path).text
    for row in rows:
        assert f"{row['name']} succeeded 4 x 12 {row['n']} " in text
    assert [(row["name"], row["n"]) for row in rows] == [(f"{name}.weight", n) for name in "ab" for n in (1, 8)]
    refused = client.post("/models", files=files, data={"n": "", "families": "csr", **DEVICE})
    assert refused.status_code == 400 and "give n, conv or a layer table" in refused.text
    assert '<div role="alert">' in refused.text and '<option value="csr" selected>' in refused.text


def test_a_tensor_and_a_type_are_chosen_and_a_job_is_cancelled(idle_client: TestClient) -> None:
    idle_client.headers.update(BROWSER)
    files = {"matrix": ("two.safetensors", save_tensors({"a": weights(1), "b": weights(2)}))}
    form = {**FORM, "dtype": "float16", "tensor": "b"}
    path = idle_client.post("/jobs", files=files, data=form, follow_redirects=False).headers["location"]
    found = page(idle_client, path)
    assert "Queued." in found.text and f"{path}/cancel" in [one.get("action") for one in found.all("form")]
    cancelled = idle_client.post(f"{path}/cancel", follow_redirects=False)
    assert (cancelled.status_code, cancelled.headers["location"]) == (303, path)
    assert "Cancelled." in page(idle_client, path).text
    assert not page(idle_client, path).all("form")
