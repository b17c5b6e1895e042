"""A request as somebody else is to work on it: as JSON, with its matrix in the store."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from lospmm.errors import BadMatrix, BadRequest, ServiceFault
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.matrix.readers import MatrixFile, read_model
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_server.queued_request import MATRICES, from_json, keep_matrix, to_json


@st.composite
def matrices(draw: st.DrawFn) -> SparseMatrix:
    m, k = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    places = draw(st.sets(st.integers(0, m * k - 1)))
    rows, cols = np.divmod(np.array(sorted(places), np.int64), k)
    values = draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=len(places)))
    return from_coo((m, k), rows, cols, np.array(values[: len(places)], np.float32))


@given(
    matrices(), st.integers(1, 10_000), st.sampled_from(sorted(DEVICES)), st.sampled_from(["auto", "ptx"]), st.data()
)
def test_it_is_the_same_request(
    tmp_path_factory: pytest.TempPathFactory,
    matrix: SparseMatrix,
    n: int,
    device: str,
    emitter: str,
    data: st.DataObject,
) -> None:
    values, seed = data.draw(st.sampled_from([("stored", 0), ("drawn", 7)]))
    store = Store(tmp_path_factory.mktemp("store"))
    options = Options(emitter=emitter, verify="cpu", measure="none", shortlist_size=data.draw(st.integers(1, 99)))
    request = Request(Problem(matrix, n, DEVICES[device]), options, values, seed).settled()
    keep_matrix(matrix, store)
    again = from_json(json.loads(json.dumps(to_json(request))), store)
    assert again.problem == request.problem
    assert (again.options, again.values, again.seed) == (request.options, values, seed)
    assert again.digest == request.digest


def test_a_layer_is_part_of_the_request(tmp_path: Path) -> None:
    """And a product's digest is what it was before there were layers."""
    store, matrix = Store(tmp_path), from_coo((2, 4), np.array([0]), np.array([1]), np.array([1.0]))
    window = Convolution(3, 1, 5, 5, 2, 2, (1, 2), (1, 0))
    epilogues = [Epilogue((0.5, 0.1), relu=True), Epilogue((0.5, 0.2), relu=True), Epilogue(residual=True), PLAIN]
    asked = [(shape, epilogue) for shape in (None, window) for epilogue in epilogues]
    asked.append((replace(window, padding=(0, 1)), PLAIN))
    keep_matrix(matrix, store)
    digests = set()
    for shape, epilogue in asked:
        n = 36 if shape is None else shape.n
        request = Request(Problem(matrix, n, DEVICES["h200"], shape, epilogue), Options()).settled()
        again = from_json(json.loads(json.dumps(to_json(request))), store)
        assert again.problem == request.problem
        assert again.digest == request.digest
        digests.add(request.digest)
    assert len(digests) == len(asked)
    assert {"convolution", "epilogue"}.isdisjoint(to_json(request_for("none")))


@pytest.mark.parametrize("layer", [{"convolution": {"groups": 2}}, {"epilogue": {"gelu": True}}])
def test_a_layer_of_another_version_is_refused(tmp_path: Path, layer: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"unexpected keyword argument|accepted by another version"):
        from_json({**to_json(request_for("none")), **layer}, Store(tmp_path))


def request_for(gpu: str | None, **options: str) -> Request:
    matrix = from_coo((2, 2), np.array([0]), np.array([1]), np.array([1.0]))
    return Request(Problem(matrix, 8, DEVICES["h200"]), Options(**options)).settled(gpu)


def test_what_auto_stands_for_is_decided_for_the_one_who_works() -> None:
    assert (request_for("h200").resolved.measure, request_for("h200").resolved.verify) == ("gpu", "gpu")
    assert (request_for("none").resolved.measure, request_for("a100").resolved.verify) == ("none", "cpu")
    assert request_for("h200").digest != request_for("none").digest
    with pytest.raises(BadRequest, match="measure gpu: h200 is needed, and this machine has a100"):
        request_for("a100", measure="gpu")


def test_the_state_of_the_cache_is_part_of_a_request_that_is_timed_otherwise(tmp_path: Path) -> None:
    """And one without it is what it was before there was a choice, which an earlier worker can read too."""
    store, usual = Store(tmp_path), request_for("h200")
    keep_matrix(usual.problem.matrix, store)
    digests = {usual.digest: "cold"}
    for cache in ("warm", "network"):
        request = request_for("h200", cache=cache)
        again = from_json(json.loads(json.dumps(to_json(request))), store)
        assert (again.options.cache, again.digest) == (cache, request.digest)
        digests[request.digest] = cache
    assert len(digests) == 3
    assert "cache" not in to_json(usual)["options"]
    assert request_for("h200", cache="cold").digest == usual.digest
    assert request_for("none", cache="network").digest == request_for("none").digest  # nothing is timed


def test_a_damaged_matrix_is_written_anew(tmp_path: Path) -> None:
    store, request = Store(tmp_path), request_for("none")
    for _ in range(2):
        keep_matrix(request.problem.matrix, store)
        assert from_json(to_json(request), store) is not None
        (store.directory(MATRICES, request.problem.matrix.fingerprint) / "matrix.npz").write_bytes(b"damaged")
    with pytest.raises(ServiceFault, match="the matrix of the request is no longer in the store, or damaged"):
        from_json(to_json(request), store)


def test_the_matrix_of_another_request_does_not_do(tmp_path: Path) -> None:
    store, request = Store(tmp_path), request_for("none")
    keep_matrix(request.problem.matrix, store)
    files = store.get(MATRICES, request.problem.matrix.fingerprint)
    assert files is not None
    store.put(MATRICES, "0" * 64, files)
    with pytest.raises(ServiceFault, match="no longer in the store"):
        from_json({**to_json(request), "fingerprint": "0" * 64}, store)


@pytest.mark.parametrize("field", ["device", "options", "fingerprint", "n", "values", "seed"])
def test_another_version_is_named(tmp_path: Path, field: str) -> None:
    content = to_json(request_for("none"))
    changed = {**content, field: {"unknown": 1}} if isinstance(content[field], dict) else dict(content)
    if changed == content:
        del changed[field]
    with pytest.raises(BadRequest, match="accepted by another version of lospmm"):
        from_json(changed, Store(tmp_path))


class TestModels:
    def test_layers_come_in_the_order_of_their_numbers(self) -> None:
        weights = {f"block.{at}.w": np.eye(at + 1, dtype=np.float32) for at in (10, 2, 1)}
        found = list(read_model(save_tensors({**weights, "bias": np.ones(3, np.float32)}), "net.safetensors"))
        assert [name for name, _ in found] == ["block.1.w", "block.2.w", "block.10.w"]
        assert [file.matrix.m for _, file in found if isinstance(file, MatrixFile)] == [2, 3, 11]

    def test_one_that_cannot_be_used_is_alone(self) -> None:
        weights = {"a": np.eye(2, dtype=np.float32), "b": np.full((2, 2), np.inf, np.float32)}
        (_, good), (_, bad) = read_model(save_tensors(weights), "net.safetensors")
        assert isinstance(good, MatrixFile)
        assert str(bad) == "net.safetensors: row 0, column 0: inf is not a finite float32"

    def test_another_format_is_one_matrix(self) -> None:
        with pytest.raises(BadMatrix, match=r"is no \.safetensors, \.onnx or \.pt"):
            list(read_model(b"2, 2, 1\n0 1 1\n0\n", "net.smtx"))
