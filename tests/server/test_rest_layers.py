"""Convolutions, biases, ReLU and residuals through the service: the same kernels as here, problems that say why."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import lospmm
from lospmm.convolution import Convolution, written
from lospmm.errors import BadRequest
from tests.core.files import saved
from tests.server.client_tools import client_of
from tests.server.conftest import npy_file, weights
from tests.server.processes import serving

WEIGHTS = weights()
BIAS = np.linspace(-1, 1, len(WEIGHTS), dtype=np.float32)
WINDOW = Convolution(2, 2, 6, 5, 3, WEIGHTS.shape[1] // 6, padding=(1, 0))
PROBLEM = "application/problem+json"


def post(client: TestClient, query: str, files: Any = None) -> Any:
    given = {"matrix": ("W.npy", npy_file()), **(files or {})}
    return client.post(f"/v1/kernels?device=h200&wait=60&{query}", files=given)


def test_a_layer(client: TestClient) -> None:
    bias = {"bias": ("b.npy", saved(np.save, BIAS))}
    answer = post(client, f"conv={written(WINDOW)}&relu=true&residual=true", bias)
    assert answer.status_code == 201, answer.text
    kernel = answer.json()
    assert (kernel["n"], kernel["convolution"]["padding"]) == (WINDOW.n, [1, 0])
    assert kernel["epilogue"] == {"bias": True, "relu": True, "residual": True}
    local = lospmm.tune(WEIGHTS, convolution=WINDOW, bias=BIAS, relu=True, residual=True, device="h200")
    assert local.manifest["cubin_sha256"] == kernel["cubin_sha256"]
    assert client.get(kernel["links"]["bias"]).content == local.artifact.files["bias.npy"]
    plain = post(client, f"conv={written(WINDOW)}&n={WINDOW.n}").json()
    assert plain["digest"] != kernel["digest"]
    assert plain["links"]["bias"] is None
    missing = client.get(f"/v1/kernels/{plain['digest']}/bias")
    assert (missing.status_code, missing.json()["detail"]) == (404, f"{plain['digest']}: this kernel adds none")
    assert plain["epilogue"] == {"bias": False, "relu": False, "residual": False}


@pytest.mark.parametrize(
    ("query", "bias", "status", "words"),
    [
        ("", None, 422, "query n: Field required"),
        ("conv=2x3", None, 400, "conv '2x3': write batch x channels x height x width"),
        ("conv=1x1x4x4,2x2", None, 400, "the weights have 24 columns, and the convolution"),
        ("conv=1x1x2x2,3x3", None, 400, "does not fit into 2 x 2"),
        ("n=8&relu=perhaps", None, 422, "query relu"),
        ("n=8&relus=true", None, 422, "query relus"),
        ("n=8", b"no array", 400, "give a .npy with a number for each row"),
        ("n=8", saved(np.save, BIAS[:2]), 400, "the bias has 2 numbers, and the weights 16 rows"),
        ("n=8", saved(np.save, WEIGHTS), 400, "of shape (16, 24)"),
    ],
)
def test_problems(client: TestClient, query: str, bias: bytes | None, status: int, words: str) -> None:
    answer = post(client, query, None if bias is None else {"bias": ("b.npy", bias)})
    assert answer.headers["content-type"] == PROBLEM
    assert (answer.status_code, answer.json()["status"]) == (status, status), answer.text
    assert words in answer.json()["detail"]


def test_a_bias_stands_beside_one_matrix(client: TestClient) -> None:
    files = [("matrix", ("W.npy", npy_file())), *[("bias", ("b.npy", saved(np.save, BIAS)))] * 2]
    answer = client.post("/v1/kernels?device=h200&n=8", files=files)
    assert answer.status_code == 400
    answer = client.post("/v1/models?device=h200&n=8", files=files[:2])
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)


def test_the_layers_of_a_model(client: TestClient) -> None:
    files = [("matrix", ("one.npy", npy_file())), ("matrix", ("two.npy", saved(np.save, WEIGHTS[:, :20])))]
    answer = client.post(f"/v1/models?device=h200&conv={written(WINDOW)}&relu=true&wait=60", files=files)
    assert answer.status_code == 201, answer.text
    one, two = answer.json()["layers"]
    assert "the weights have 20 columns" in two["error"]["detail"]
    kernel = client.get(one["kernel"]).json()
    assert kernel["n"] == WINDOW.n and kernel["epilogue"]["relu"]
    answer = client.post("/v1/models?device=h200", files=files)
    assert answer.status_code == 422 and "query n: Field required" in answer.json()["detail"]


def test_the_client(tmp_path: Path) -> None:
    layer: dict[str, Any] = {"convolution": WINDOW, "bias": BIAS, "relu": True, "device": "h200"}
    wide = WEIGHTS.reshape(len(WEIGHTS), WINDOW.channels, WINDOW.kernel_height, WINDOW.kernel_width)
    with serving(tmp_path) as (_, port), client_of(port) as client:
        kernel = client.tune(wide, **layer)
        assert kernel.artifact.files == lospmm.tune(wide, **layer).artifact.files
        with pytest.raises(BadRequest, match="n is missing"):
            client.tune(WEIGHTS, device="h200")
        with pytest.raises(BadRequest, match="bias: number 0 is nan"):
            client.tune(WEIGHTS, 8, bias=[np.nan])
        [result] = client.tune_model({"one": WEIGHTS}, relu=True, convolution=WINDOW, device="h200")
        assert result.kernel is not None and result.kernel.manifest["epilogue"]["relu"]
