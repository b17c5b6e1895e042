"""The client against a service: the same kernels, files and errors as without one."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save_file

import lospmm
from lospmm.artifact import kept
from lospmm.artifact.artifact import MATRIX_FILE, SPACE_FILE
from lospmm.artifact.manifest import MANIFEST_FILE
from lospmm.client import answers as remote
from lospmm.client import connection
from lospmm.client.answers import ProblemDetails
from lospmm.client.client import Client
from lospmm.client.connection import Gone
from lospmm.errors import BadMatrix, BadRequest, BadSettings, DiskFault, LospmmError, ServiceFault, Unsupported
from lospmm.matrix.csr import from_dense
from lospmm.matrix.readers import VECTOR
from lospmm.model.layer_table import LayerSpec, LayerTable
from lospmm.problem.convolution import Convolution, written
from lospmm_server import keys, problems
from lospmm_server.database import open_database
from tests.docs.pages import DOCS, blocks
from tests.fixtures.files import smtx
from tests.server.client_tools import client_of, free_port, threaded
from tests.server.conftest import weights
from tests.server.processes import client_at, serving
from tests.server.served import served


@pytest.fixture
def client() -> Iterator[Client]:
    with served() as port, client_of(port) as client:
        yield client


def test_a_kernel_is_the_one_of_the_service_byte_for_byte(client: Client, tmp_path: Path) -> None:
    kernel = client.tune(weights(), 64, device="h200")
    (job,) = client.jobs()
    there = kept.find(job.id, kept.open_store())
    assert there is not None
    assert kernel.artifact.files == there.files
    assert {MATRIX_FILE, SPACE_FILE} <= set(there.files)
    assert kernel.manifest == json.loads(there.files[MANIFEST_FILE])
    kernel.save(tmp_path / "kernel")
    assert {path.name: path.read_bytes() for path in (tmp_path / "kernel").iterdir()} == dict(there.files)
    b = np.random.default_rng(0).standard_normal((12, 64)).astype(np.float32)
    assert np.allclose(lospmm.load(tmp_path / "kernel").run_on_cpu(b), weights() @ b, atol=1e-4)
    assert client.tune(from_dense(weights()), np.int64(64), device="h200").artifact.files == there.files
    assert len(list(client.jobs())) == 1
    assert client.kernel(job.id).artifact == kernel.artifact


def test_a_pattern_is_posted_as_one(client: Client, tmp_path: Path) -> None:
    (tmp_path / "w.smtx").write_bytes(smtx(weights()))
    local = lospmm.tune(tmp_path / "w.smtx", n=32, device="h200", seed=3)
    kernel = client.tune(tmp_path / "w.smtx", 32, device="h200", seed=3)
    assert (kernel.manifest["values"], kernel.manifest["seed"]) == ("drawn", 3)
    assert kernel.artifact.files == local.artifact.files  # found in the cache, under the same digest


def test_options_of_the_service(client: Client) -> None:
    kernel = client.tune(weights(), 16, device="a100", emitter="ptx", verify="none", shortlist_size=10)
    assert (kernel.manifest["emitter"], kernel.manifest["verified"]) == ("ptx", None)
    halves = client.tune(weights(), 16, device="h200", dtype="float16", sums="float16", families="unrolled").manifest
    assert (halves["sums"], halves["tile"]["thread_columns"]) == ("float16", 2)
    with pytest.raises(BadRequest, match="cache 'hot': choose one of cold, warm, network"):
        client.tune(weights(), 16, device="h200", cache="hot")
    # Nothing is timed there, so that it is the same request.
    plain, network = (client.tune(weights(), 16, device="h200", **asked) for asked in ({}, {"cache": "network"}))
    assert network.artifact.files == plain.artifact.files
    with pytest.raises(Unsupported, match="shortlist 3: a service decides that itself"):
        client.tune(weights(), 16, shortlist_size=3)
    with pytest.raises(BadRequest, match="unknown device 'h2000'"):
        client.tune(weights(), 16, device="h2000")
    for n in (0, -1, 2**30):
        with pytest.raises(BadRequest, match=rf"^n is {n}: B must have from 1 to"):
            client.tune(weights(), n, device="h200")
    with pytest.raises(BadRequest, match=r"device auto: this service has no GPU of the device table; name the one"):
        client.tune(weights(), 16)
    with pytest.raises(Unsupported, match="CUDA 12 toolkit"):
        client.tune(weights(), 16, device="v100")
    with pytest.raises(BadRequest, match="is not the id"):
        client.job("../../etc/passwd")
    with pytest.raises(Gone, match="no kernel of this digest"):
        client.kernel("0" * 64)


def test_layers_of_a_model_are_timed_as_in_a_network(client: Client) -> None:
    ask, caches = client._connection.ask, []

    def noted(method: str, path: str, **request: Any) -> httpx2.Response:
        caches.extend([request["params"]["cache"]] if method == "POST" else [])
        return ask(method, path, **request)

    client._connection.ask = noted  # type: ignore[method-assign]
    client.tune(weights(), 16, device="h200")
    for options in ({}, {"cache": "cold"}):
        list(client.each_layer({"fc": weights()}, 16, device="h200", **options))
    assert caches == ["cold", "network", "cold"]


def test_every_page_of_jobs(client: Client) -> None:
    for n in range(1, 4):
        client.tune(weights(), n, device="h200")
    ask, pages = client._connection.ask, []

    def short_pages(method: str, path: str, **request: Any) -> httpx2.Response:
        pages.append(path)
        return ask(method, path, **{**request, "params": {**request["params"], "limit": 1}})

    client._connection.ask = short_pages  # type: ignore[method-assign]
    assert len({job.id for job in client.jobs("succeeded")}) == 3
    assert len(pages) == 3
    assert not list(client.jobs("failed"))


def test_a_model_whose_bad_layers_fail_alone(client: Client) -> None:
    told: list[tuple[str, str, int, int]] = []
    layers = {
        "blocks/0/w": weights(1),
        "..": weights(2),
        "same": weights(1),
        "nan": np.full((4, 4), np.nan),
        "": weights(3),
        "x" * 300: weights(4),
        "flat": np.ones(4),
    }
    found = client.tune_model(layers, 64, device="h200", progress=lambda *step: told.append(step))
    assert [layer.name for layer in found] == list(layers)
    failed = {layer.name: layer.error for layer in found if layer.error is not None}
    assert failed.keys() == {"nan", "flat"}
    assert all(isinstance(error, BadMatrix) for error in failed.values())
    for layer in found:
        if layer.error is None:
            assert layer.kernel.manifest["fingerprint"] == from_dense(layers[layer.name]).fingerprint
            assert (layer.name, "succeeded", 1, 1) in told
    assert found[0].digest == found[2].digest
    assert client.tune_model({"nan": layers["nan"]}, 64, device="h200")[0].kernel is None
    for wrong, says in (({}, "no layers"), ({1: weights()}, "is not the name of a layer")):
        with pytest.raises(BadRequest, match=says):
            client.tune_model(wrong, 64, device="h200")


def test_several_columns_of_a_model(client: Client) -> None:
    """A result for each layer and N, by a table too; a layer that cannot be read fails at each."""
    told: list[tuple[str, str, int, int]] = []
    layers = {"a/b": weights(1), "nan": np.full((4, 4), np.nan), "c": weights(2)}
    found = client.tune_model(layers, [64, 8], device="h200", progress=lambda *step: told.append(step))
    assert [(layer.name, layer.n) for layer in found] == [(name, n) for name in layers for n in (8, 64)]
    for layer in found:
        if layer.name == "nan":
            assert isinstance(layer.error, BadMatrix)
        else:
            manifest = layer.kernel.manifest
            assert manifest["fingerprint"] == from_dense(layers[layer.name]).fingerprint and manifest["n"] == layer.n
            assert (f"{layer.name}@{layer.n}", "succeeded", 1, 1) in told
    del layers["nan"]
    table = LayerTable({"a/b": LayerSpec(n=(8, 64)), "c": LayerSpec(n=64)})
    digests = [layer.digest for layer in found if layer.error is None]
    assert [layer.digest for layer in client.tune_model(layers, layers=table, device="h200")] == [
        *digests[:2], digests[3]
    ]  # fmt: skip
    for wrong, says in (([], "n is empty"), ([1, 2.5], "n is 2.5: give a whole number"), (None, "n is missing")):
        with pytest.raises(BadRequest, match=says):
            client.tune_model(layers, wrong, device="h200")


def test_weights_that_are_not_pruned_are_skipped(client: Client) -> None:
    layers = {"embed": np.ones((4, 12)), "fc": weights(1)}
    pruned, dense = client.tune_model(layers, 64, device="h200")
    assert (pruned.name, dense.name, dense.skipped) == ("fc", "embed", "fewer zeros than the 40% of min_sparsity")
    assert all(layer.kernel for layer in client.tune_model(layers, 64, device="h200", min_sparsity=0))
    with pytest.raises(BadRequest, match="no layer is asked for: embed: fewer zeros than the 90%"):
        client.tune_model(layers, 64, device="h200", min_sparsity=0.9)


def test_a_layers_kernel_that_is_gone_is_the_error_of_its_layer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, lost = Client._fetched, ["a"]

    def once(self: Client, digest: str, *others: Any) -> lospmm.Kernel:
        if lost:
            raise Gone(f"kernel {digest}: {lost.pop()}")
        return fetched(self, digest, *others)

    monkeypatch.setattr(Client, "_fetched", once)
    gone, other = client.tune_model({"a": weights(1), "b": weights(2)}, 64, device="h200", min_sparsity=0)
    assert isinstance(gone.error, Gone) and gone.kernel is None
    assert other.error is None and other.kernel is not None and not lost


def test_biases_of_a_model(client: Client, tmp_path: Path) -> None:
    bias = np.linspace(-1, 1, 4, dtype=np.float32)
    layers = {"blocks/0/w": weights(1), "plain": weights(1), "short": weights(1), "bad": weights(1)}
    given = {"blocks/0/w": bias, "short": bias[:3], "bad": np.full(4, np.nan)}
    found = client.tune_model(layers, 64, device="h200", biases=given)
    own = lospmm.tune(weights(1), n=64, bias=bias, device="h200")
    assert found[0].kernel is not None and found[1].kernel is not None
    assert found[0].kernel.manifest["cubin_sha256"] == own.manifest["cubin_sha256"]
    assert not found[1].kernel.manifest["epilogue"]["bias"]
    assert [type(layer.error) for layer in found[2:]] == [BadRequest, BadRequest]
    save_file({"fc.weight": weights(1), "fc.bias": bias}, tmp_path / "net.safetensors")
    biased, other = client.tune_model(tmp_path / "net.safetensors", 64, device="h200", biases=True)
    assert (other.name, other.skipped) == ("fc.bias", VECTOR)
    assert biased.digest == found[0].digest
    with pytest.raises(BadRequest, match="biases: the model has no layer 'other'"):
        client.tune_model(layers, 64, device="h200", biases={"other": bias})
    with pytest.raises(BadRequest, match="of weights by name, give biases by name too"):
        client.tune_model(layers, 64, device="h200", biases=True)
    np.save(tmp_path / "fc.npy", weights(1))
    (tmp_path / "net.safetensors").unlink()
    with pytest.raises(BadRequest, match="biases: no layer has one beside its weight"):
        client.tune_model(tmp_path, 64, device="h200", biases=True)


def test_windows_of_a_model_are_given_as_they_are(client: Client) -> None:
    """(out, in / groups, height, width), by one convolution for all layers or by a table's; another one is an error."""
    window = weights(3).reshape(4, 3, 2, 2)
    one = Convolution(2, 3, 5, 5, 2, 2)
    fitting, other = client.tune_model({"a": window, "b": window[:, :2]}, convolution=one, device="h200")
    assert fitting.kernel is not None
    own = lospmm.tune(window, convolution=one, device="h200")
    assert fitting.kernel.manifest["cubin_sha256"] == own.manifest["cubin_sha256"]
    assert "the convolution takes (4, 3, 2, 2)" in str(other.error)
    grouped = LayerTable({"a": LayerSpec(conv=written(Convolution(2, 6, 5, 5, 2, 2)), groups=2)})
    (found,) = client.tune_model({"a": window}, layers=grouped, device="h200")
    assert found.kernel is not None and (found.kernel.manifest["m"], found.kernel.manifest["k"]) == (4, 24)


@pytest.mark.slow  # the two have settings of their own
def test_a_layer_that_the_service_refuses_is_named(
    tmp_path: Path, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_MAX_NONZEROS", 100)
    with serving(tmp_path) as (_, port):
        set_environment("LOSPMM_MAX_NONZEROS", 4000)  # more than the service takes
        with client_of(port) as client:
            large = np.ones((40, 40), np.float32)
            small, refused = client.tune_model({"small": weights(), "large": large}, 64, device="h200", min_sparsity=0)
    assert small.kernel is not None
    assert isinstance(refused.error, BadMatrix) and "1600 nonzeros, more than the 100" in str(refused.error)


@pytest.mark.slow
def test_a_service_reads_less_than_a_command_unless_it_is_told(tmp_path: Path) -> None:
    refused = pytest.raises(BadMatrix, match="4002000 nonzeros, more than the 4000000 that LOSPMM_MAX_NONZEROS allows")
    with serving(tmp_path) as (_, port), client_of(port) as client, refused:
        client.tune_model({"large": np.ones((2001, 2000), np.float32)}, 64, device="h200", min_sparsity=0)


def test_addresses_and_keys_that_are_none() -> None:
    for url, says in (
        ("localhost:8000", "is 'localhost:8000': it must begin with http"),
        ("user:secret@host", "the address of the service must begin with http"),
        ("ftp://host", "must begin with http"),
        ("http://", "name a host"),
        ("http://user:secret@host", "holds a password"),
        ("http://host/?a=b", "leave out what follows"),
        ("http://host:port", "address of the service"),
    ):
        with pytest.raises(BadRequest, match=says) as refused:
            Client(url)
        assert "secret" not in str(refused.value)
    for key in ("", "a b", "a\nb", "ß", "x" * 300):
        with pytest.raises(BadRequest, match="API key") as refused:
            Client("http://host", key)
        assert not key or key not in str(refused.value)


def test_nobody_at_the_address_and_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 0.3)
    says = r"refused; tried for 0\.3 s; does `lospmm serve` run there"
    with client_of(free_port()) as client, pytest.raises(ServiceFault, match=says):
        client.tune(weights(), 64, device="h200")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "jobs").write_text("<html>")
    pages = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), pages)) as port, client_of(port) as client:
        with pytest.raises(ServiceFault, match=r"answered 501.*"):
            client.tune(weights(), 64, device="h200")
        with pytest.raises(ServiceFault, match=r"not as a service of lospmm does.*is the address right\?"):
            next(client.jobs())


def test_a_key() -> None:
    database = open_database()
    database.migrate()
    key = keys.add(database, "team")
    database.close()
    with served(asks_for_keys=True) as port:
        for wrong, says in ((None, "asks for an API key"), ("x" * 20, "does not take this API key")):
            with client_of(port, key=wrong) as client, pytest.raises(BadRequest, match=f"{says}; give one of its own"):
                client.tune(weights(), 64, device="h200")
        with client_of(port, key=key) as client:
            assert client.tune(weights(), 64, device="h200").manifest["n"] == 64


#: Settings and disks that are the service's own.
OF_THE_SERVICE = (BadSettings, DiskFault)


@pytest.mark.parametrize("error", problems.ERRORS)
def test_problems_become_the_errors_that_they_were(error: type[LospmmError]) -> None:
    kind = problems.ERRORS[error]
    found = remote.error_of(ProblemDetails(f"/problems/{kind.name}", "why"), "http://there")
    assert str(found) == "http://there: why"
    is_core = error.__module__ == "lospmm.errors" and error not in OF_THE_SERVICE
    if is_core:
        assert type(found) is error
    else:
        assert type(found) is ServiceFault


def test_refusals_by_status_are_of_the_request() -> None:
    for kind in (*problems.STATUSES.values(), problems.BAD_PARAMETER, problems.INTERNAL):
        expected = ServiceFault if kind.status >= 500 else BadRequest
        assert type(remote.error_of(ProblemDetails(f"/problems/{kind.name}", "why"), "there")) is expected, kind


def test_the_client_needs_no_web_framework() -> None:
    code = "import sys, lospmm.client; print({'fastapi', 'starlette', 'uvicorn', 'sqlalchemy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = (block.text for block in blocks((DOCS / "library.md").read_text()) if "lospmm.client" in block.text)
    with served() as port:
        variables: dict[str, Any] = {}
        exec(text.replace("localhost:8000", f"127.0.0.1:{port}"), variables)
        kernel = variables["tune_there"](weights(), {"fc": weights(), "bad": np.ones(3)})
    assert kernel.manifest["n"] == 200
    assert capsys.readouterr().out.startswith("fc <Kernel lospmm_4x12_n200_")


def test_the_files_have_routes() -> None:
    with served() as port, client_of(port) as client, client_at(port) as plain:
        kernel = client.tune(weights(), 64, device="h200")
        links = plain.get(f"/v1/kernels/{next(client.jobs()).id}").json()["links"]
        matrix, space = plain.get(links["matrix"]), plain.get(links["space"])
        assert (matrix.content, space.content) == tuple(
            kernel.artifact.files[name] for name in (MATRIX_FILE, SPACE_FILE)
        )
        assert matrix.headers["content-disposition"].endswith('.npz"')
        assert space.headers["content-type"] == "application/json"
        for answer in (matrix, space):
            assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
            again = plain.get(answer.request.url.path, headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304
