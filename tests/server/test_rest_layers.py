"""Convolutions, biases, ReLU and residuals through the service: the same kernels as here, problems that say why."""

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as save_tensors
from starlette.testclient import TestClient

import lospmm
from lospmm.errors import BadRequest
from lospmm.model.layer_table import NO_WINDOW
from lospmm.problem.convolution import Convolution, written
from tests.fixtures.files import saved
from tests.server.client_tools import client_of
from tests.server.conftest import npy_file, weights
from tests.server.served import served

WEIGHTS = weights()
BIAS = np.linspace(-1, 1, len(WEIGHTS), dtype=np.float32)
WINDOW = Convolution(2, 2, 6, 5, 3, WEIGHTS.shape[1] // 6, padding=(1, 0))
PROBLEM = "application/problem+json"


def post(client: TestClient, query: str, files: Any = None) -> Any:
    given = {"matrix": ("W.npy", npy_file()), **(files or {})}
    return client.post(f"/v1/kernels?device=h200&wait=60&{query}", files=given)


def test_a_layer(shared: TestClient) -> None:
    bias = {"bias": ("b.npy", saved(np.save, BIAS))}
    answer = post(shared, f"conv={written(WINDOW)}&relu=true&residual=true", bias)
    assert answer.status_code == 201, answer.text
    kernel = answer.json()
    assert (kernel["n"], kernel["convolution"]["padding"]) == (WINDOW.n, [1, 0])
    assert kernel["epilogue"] == {"bias": True, "relu": True, "residual": True}
    local = lospmm.tune(WEIGHTS, convolution=WINDOW, bias=BIAS, relu=True, residual=True, device="h200")
    assert local.manifest["cubin_sha256"] == kernel["cubin_sha256"]
    assert shared.get(kernel["links"]["bias"]).content == local.artifact.files["bias.npy"]
    plain = post(shared, f"conv={written(WINDOW)}&n={WINDOW.n}").json()
    assert plain["digest"] != kernel["digest"]
    assert plain["links"]["bias"] is None
    missing = shared.get(f"/v1/kernels/{plain['digest']}/bias")
    assert (missing.status_code, missing.json()["detail"]) == (404, f"{plain['digest']}: this kernel adds none")
    assert plain["epilogue"] == {"bias": False, "relu": False, "residual": False}


@pytest.mark.parametrize(
    ("query", "bias", "status", "words"),
    [
        ("", None, 422, "query n: Field required"),
        ("conv=2x3", None, 400, "conv '2x3': write batch x channels x height x width"),
        ("conv=1x1x4x4,2x2", None, 400, "the weights have 12 columns, and the convolution"),
        ("conv=1x1x2x2,3x3", None, 400, "does not fit into 2 x 2"),
        ("conv=1x1x4x4,2x2&transpose=true", None, 400, "transpose goes with n alone"),
        ("n=8&relu=perhaps", None, 422, "query relu"),
        ("n=8&relus=true", None, 422, "query relus"),
        ("n=8", b"no array", 400, "give a .npy with a number for each row"),
        ("n=8", saved(np.save, BIAS[:2]), 400, "the bias has 2 numbers, and the weights 4 rows"),
        ("n=8", saved(np.save, WEIGHTS), 400, "of shape (4, 12)"),
    ],
)
def test_problems(shared: TestClient, query: str, bias: bytes | None, status: int, words: str) -> None:
    answer = post(shared, query, None if bias is None else {"bias": ("b.npy", bias)})
    assert answer.headers["content-type"] == PROBLEM
    assert (answer.status_code, answer.json()["status"]) == (status, status), answer.text
    assert words in answer.json()["detail"]


def test_a_bias_stands_beside_one_matrix(shared: TestClient) -> None:
    files = [("matrix", ("W.npy", npy_file())), *[("bias", ("b.npy", saved(np.save, BIAS)))] * 2]
    answer = shared.post("/v1/kernels?device=h200&n=8", files=files)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
    assert answer.json()["detail"] == "Too many files. Maximum number of files is 2."


def post_model(client: TestClient, files: list[Any], query: str = "&n=8") -> Any:
    return client.post(f"/v1/models?device=h200&wait=60{query}", files=files)


def bias_file(name: str, bias: np.ndarray) -> tuple[str, tuple[str, bytes]]:
    return "bias", (name, saved(np.save, bias))


def test_biases_of_a_model_of_files(shared: TestClient) -> None:
    matrices = [("matrix", (f"{name}.npy", npy_file())) for name in ("fc1", "fc2", "fc3", "fc4")]
    biases = [bias_file("fc2.npy", BIAS), bias_file("fc3.npy", BIAS[:2]), bias_file("fc4.npy", np.array(["x"]))]
    job = post_model(shared, matrices + biases).json()
    layers = {layer["name"]: layer for layer in job["layers"]}
    kernels = {name: shared.get(layers[name]["kernel"]).json() for name in ("fc1", "fc2")}
    assert [kernels[name]["epilogue"]["bias"] for name in ("fc1", "fc2")] == [False, True]
    local = lospmm.tune(WEIGHTS, n=8, bias=BIAS, device="h200")
    assert local.manifest["cubin_sha256"] == kernels["fc2"]["cubin_sha256"]
    assert layers["fc3"]["error"]["detail"] == "the bias has 2 numbers, and the weights 4 rows"
    assert "bias fc4.npy: of shape (1,) and type <U1" in layers["fc4"]["error"]["detail"]


def test_biases_of_a_safetensors(shared: TestClient) -> None:
    tensors = {"a.weight": WEIGHTS, "a.bias": BIAS, "b.weight": WEIGHTS, "c.weight": WEIGHTS, "c.bias": BIAS[:3]}
    tensors |= {"d.weight": WEIGHTS, "d.bias": BIAS.astype(np.int8)}
    files = [("matrix", ("net.safetensors", save_tensors(tensors)))]
    layers = {layer["name"]: layer for layer in post_model(shared, files, "&n=8&biases=true").json()["layers"]}
    assert shared.get(layers["a.weight"]["kernel"]).json()["epilogue"]["bias"]
    assert not shared.get(layers["b.weight"]["kernel"]).json()["epilogue"]["bias"]
    assert layers["c.weight"]["error"]["detail"] == "the bias has 3 numbers, and the weights 4 rows"
    assert "tensor 'd.bias' is I8 of shape [4]" in layers["d.weight"]["error"]["detail"]
    plain = {layer["name"]: layer["kernel"] for layer in post_model(shared, files).json()["layers"]}
    kernel = layers["b.weight"]["kernel"]
    assert plain == {name: kernel if name.endswith("weight") else None for name in tensors}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([bias_file("fc2.npy", BIAS)], "bias 'fc2': no matrix file is called so"),
        ([bias_file("fc1.npy", BIAS)] * 2, "and perhaps one for each in 'bias'"),
    ],
)
def test_biases_of_no_layer(shared: TestClient, files: list[Any], words: str) -> None:
    answer = post_model(shared, [("matrix", ("fc1.npy", npy_file())), *files])
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    "files",
    [
        [("matrix", ("fc1.npy", npy_file()))],
        [("matrix", (name, npy_file())) for name in ("fc1.npy", "fc2.npy")],
        [("matrix", ("net.safetensors", save_tensors({"bias": BIAS, "a.weight": WEIGHTS})))],
    ],
)
def test_biases_that_no_layer_has(idle_client: TestClient, files: list[Any]) -> None:
    answer = post_model(idle_client, files, "&n=8&biases=true")
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
    assert answer.json()["detail"].startswith("biases: no layer has one beside its weight")
    assert ", bias;" not in answer.json()["detail"], "the vector is no layer"
    assert idle_client.get("/v1/jobs").json()["jobs"] == []


def test_biases_beside_a_safetensors_are_refused(shared: TestClient) -> None:
    files = [("matrix", ("net.safetensors", save_tensors({"net": WEIGHTS}))), bias_file("net.npy", BIAS)]
    answer = post_model(shared, files)
    assert answer.status_code == 400 and "are taken with biases=true" in answer.json()["detail"]
    files = [("matrix", (f"{name}.npy", npy_file())) for name in ("fc1", "fc2")] + [bias_file("fc1.npy", BIAS)] * 2
    answer = post_model(shared, files)
    assert answer.status_code == 400 and "two biases are of one layer" in answer.json()["detail"]


def test_the_layers_of_a_model(shared: TestClient) -> None:
    files = [("matrix", ("one.npy", npy_file())), ("matrix", ("two.npy", saved(np.save, WEIGHTS[:, :10])))]
    answer = shared.post(f"/v1/models?device=h200&conv={written(WINDOW)}&relu=true&wait=60", files=files)
    assert answer.status_code == 201, answer.text
    one, two = answer.json()["layers"]
    assert "the weights have 10 columns" in two["error"]["detail"]
    kernel = shared.get(one["kernel"]).json()
    assert kernel["n"] == WINDOW.n and kernel["epilogue"]["relu"]
    answer = shared.post("/v1/models?device=h200", files=files)
    assert answer.status_code == 400 and answer.json()["detail"] == "n is missing: give n, conv or a layer table"


def test_the_client() -> None:
    layer: dict[str, Any] = {"convolution": WINDOW, "bias": BIAS, "relu": True, "device": "h200"}
    wide = WEIGHTS.reshape(len(WEIGHTS), WINDOW.channels, WINDOW.kernel_height, WINDOW.kernel_width)
    with served() as port, client_of(port) as client:
        kernel = client.tune(wide, **layer)
        assert kernel.artifact.files == lospmm.tune(wide, **layer).artifact.files
        with pytest.raises(BadRequest, match="n is missing"):
            client.tune(WEIGHTS, device="h200")
        with pytest.raises(BadRequest, match="bias: number 0 is nan"):
            client.tune(WEIGHTS, 8, bias=[np.nan])
        [result] = client.tune_model({"one": WEIGHTS}, relu=True, convolution=WINDOW, device="h200")
        assert result.kernel is not None and result.kernel.manifest["epilogue"]["relu"]


TABLE = f"""
[layers."conv.weight"]
conv = "{written(WINDOW)}"
bias = true
relu = true
dtype = "float16"

[layers."fc.*"]
n = 24

[layers."line.weight"]
conv = "2x6x1x9,1x2"

[layers."conv1d.weight"]
n = 24
""".encode()


def test_each_layer_has_a_row_of_its_own(shared: TestClient) -> None:
    """By one table: a convolution and a product as by a POST of each; what has no row is skipped with a reason."""
    window = WEIGHTS.reshape(4, 2, 3, -1)
    tensors = {"conv.weight": window, "conv.bias": BIAS, "fc.weight": WEIGHTS, "head.weight": WEIGHTS}
    tensors |= {"fc.scale": np.ones((3, 3), np.int8), "conv1d.weight": np.ones((2, 3, 1), np.float32)}
    tensors["line.weight"] = WEIGHTS.reshape(4, 6, 2)
    model = ("matrix", ("net.safetensors", save_tensors(tensors)))
    answer = post_model(shared, [model, ("layers", ("layers.toml", TABLE))], "")
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["state"], job["progress"]) == ("succeeded", {"layers": {"done": 3, "total": 3}})
    layers = {layer["name"]: layer for layer in job["layers"]}
    assert {name: layer["skipped"] for name, layer in layers.items() if layer["skipped"]} == {
        "head.weight": "the layer table has no row for it",
        "conv.bias": "a vector: no kernel of its own",
        "conv1d.weight": NO_WINDOW,
        "fc.scale": "I8 with 2 axes: weights are F16, BF16, F32, F64, with 2 to 4 axes",
    }
    alone = post(shared, f"conv={written(WINDOW)}&relu=true&dtype=float16", {"bias": ("b.npy", saved(np.save, BIAS))})
    assert layers["conv.weight"]["kernel"].endswith(alone.json()["digest"])
    assert layers["fc.weight"]["kernel"].endswith(post(shared, "n=24").json()["digest"])
    assert layers["line.weight"]["kernel"].endswith(post(shared, "conv=2x6x1x9,1x2").json()["digest"])


@pytest.mark.parametrize(
    ("query", "table", "words"),
    [
        ("n=8&relu=true", TABLE, "layers says these of each layer: leave out n, relu"),
        ("", b"[layers.none]\nn = 8", "layer table: 'none' is not a layer of the model: W"),
        ("", b"[layers.W]\nn = 16777217", "n is 16777217, more than"),
        ("", b"[layers.W]\nskip = 'dense'", "no layer is asked for: W: dense"),
        ("", b"[layers.W]", "layer table layers.toml: 'W': n is missing"),
        ("", b"W: 8", "neither TOML nor JSON"),
    ],
)
def test_tables_that_are_refused(shared: TestClient, query: str, table: bytes, words: str) -> None:
    files = [("matrix", ("W.npy", npy_file())), ("layers", ("layers.toml", table))]
    answer = shared.post(f"/v1/models?device=h200&{query}", files=files)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
    assert words in answer.json()["detail"]


def test_a_kernel_has_no_table(shared: TestClient) -> None:
    answer = post(shared, "n=8", {"layers": ("layers.toml", TABLE)})
    assert answer.status_code == 400 and "expected one file, in the field 'matrix'" in answer.json()["detail"]
