"""``lospmm tune --server`` and ``tune-model --server`` against a real service."""

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save_file

import lospmm
from lospmm.artifact import artifact, kept
from lospmm.cli import main as cli
from lospmm.client import connection
from lospmm.client.client import Client
from lospmm.settings import settings
from lospmm.store import Store
from lospmm_server import keys
from lospmm_server.database import open_database
from tests.cli.command import COMMAND, H200, Answer, Command, process
from tests.fixtures.waiting import wait_until
from tests.server.client_tools import free_port, serve_at
from tests.server.conftest import SlowToolkit, weights
from tests.server.processes import serving
from tests.server.served import served


@pytest.fixture
def port() -> Iterator[int]:
    with served() as port:
        yield port


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """A command in this process, whose own cache may be another than the service's."""

    def run(*arguments: object, cache: Path | None = None, **variables: str) -> Answer:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in (variables if cache is None else variables | {"LOSPMM_CACHE_DIR": f"{cache}"}).items():
                patched.setenv(name, value)
            settings.cache_clear()
            status = cli.run([str(argument) for argument in arguments])
        settings.cache_clear()
        return Answer(status, *capsys.readouterr())

    return run


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    np.save(tmp_path / "w.npy", weights())
    return tmp_path / "w.npy"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    layers = {"a": weights(1), "b/c": weights(2), "same": weights(1), "nan": np.full((2, 2), np.nan, np.float32)}
    save_file(layers, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_tune_by_a_service(run: Command, port: int, matrix: Path, tmp_path: Path) -> None:
    address, cache = f"http://127.0.0.1:{port}", tmp_path / "own"
    done = run("tune", matrix, *H200, "--n", 16, "--server", address, "--out", tmp_path / "k", "--json", cache=cache)
    assert done.status == 0, done.err
    kernel = artifact.read(tmp_path / "k")
    assert json.loads(done.out) == kernel.manifest
    with Client(address) as client:
        (job,) = client.jobs()
    assert kept.find(job.id, kept.open_store()) == kernel
    assert not cache.exists(), "nothing was done here"
    again = run(
        "tune", matrix, *H200, "--n", 16, "--out", tmp_path / "k2", "--quiet", cache=cache, LOSPMM_SERVER=address
    )
    assert (again.status, again.err) == (0, "")
    assert artifact.read(tmp_path / "k2") == kernel
    local = run(
        "tune", matrix, *H200, "--n", 16, "--server", "", "--out", tmp_path / "k3", cache=cache, LOSPMM_SERVER="x"
    )
    assert local.status == 0 and list(Store(cache).entries())


def test_what_a_service_refuses(run: Command, port: int, matrix: Path, tmp_path: Path) -> None:
    address = ("--server", f"http://127.0.0.1:{port}")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "thesis.tex").write_text("years")
    for more, says in (
        (("--measure", "none"), "measure 'none': a service decides that itself"),
        (("--trials", "proxy"), "trials proxy: nothing is timed; use measure auto on a machine with h200"),
        (("--ranker", "best"), "ranker 'best': a service decides that itself; leave it out"),
        (("--shortlist", 0), "shortlist 0: a service decides that itself; leave it out"),
        (("--budget", -1), "budget -1.0: a service decides that itself; leave it out"),
        (("--verify", "gpu"), "verify gpu: h200 is needed"),
        (("--device", "gpu.toml"), "unknown device 'gpu.toml'"),
        (("--server", "localhost"), "must begin with http"),
        (("--key", "a b"), "the API key is not one"),
        (("--out", tmp_path / "held"), "holds something other than a kernel"),
    ):
        command = ("tune", matrix, "--n", 16, *H200, "--out", tmp_path / "k", *address, *more)
        answer = run(*command)
        assert (answer.status, says in answer.error) == (2, True), answer.err
    for n in (0, -3, 2**30):
        there, here = (run("tune", matrix, "--n", n, *H200, "--out", tmp_path / "k", *more) for more in (address, ()))
        assert there == here and here.error.startswith(f"n is {n}: B must have from 1 to ")
    assert not (tmp_path / "k").exists()


def test_a_service_takes_the_defaults_of_what_it_decides(run: Command, port: int, matrix: Path, tmp_path: Path) -> None:
    usual = ("--ranker", "auto", "--shortlist", 10, "--measure", "auto", "--trials", "full")
    address = f"http://127.0.0.1:{port}"
    done = run("tune", matrix, "--n", 16, *H200, "--server", address, "--out", tmp_path / "k", *usual)
    assert done.status == 0, done.err


def test_nobody_there_and_no_key(run: Command, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 0.3)
    here = ("tune", matrix, "--n", 16, *H200, "--out", tmp_path / "k", "--json", "--quiet", "--server")
    nobody = run(*here, f"http://127.0.0.1:{free_port()}")
    assert (nobody.status, json.loads(nobody.out)["error"]["type"]) == (4, "ServiceFault")
    database = open_database()
    database.migrate()
    key = keys.add(database, "team")
    database.close()
    with served(asks_for_keys=True) as port:
        refused = run(*here, f"http://127.0.0.1:{port}")
        assert (refused.status, "API key" in refused.error) == (2, True)
        assert run(*here, f"http://127.0.0.1:{port}", LOSPMM_KEY=key).status == 0
        assert run(*here, f"http://127.0.0.1:{port}", "--key", key).status == 0


def test_a_model_by_a_service(run: Command, port: int, model: Path, tmp_path: Path) -> None:
    out, address = tmp_path / "kernels", ("--server", f"http://127.0.0.1:{port}")
    command = ("tune-model", model, "--n", 16, *address, "--out", out)
    first = run(*command, *H200, cache=tmp_path / "own")
    assert first.status == 6
    assert "error: layer nan: net.safetensors: row 0, column 0: nan is not a finite float32\n" in first.err
    assert "kernel 2 of 4: b/c\n" in first.err
    layers = {layer["name"]: layer for layer in json.loads((out / "report.json").read_text())["layers"]}
    assert list(layers) == ["a", "b/c", "nan", "same"]
    store = kept.open_store()
    for name in ("a", "b/c", "same"):
        assert artifact.read(out / layers[name]["folder"]) == kept.find(layers[name]["digest"], store)
    assert layers["a"]["digest"] == layers["same"]["digest"]
    before = {path: path.stat().st_ino for path in out.iterdir() if path.is_dir()}
    (out / "a" / "kernel.cubin").write_bytes(b"damaged")
    second = run(*command, *H200, "--json", "--quiet", cache=tmp_path / "own")
    assert second.status == 6
    assert {layer["name"]: layer for layer in json.loads(second.out)["layers"]} == layers
    assert {path.name for path in before if path.stat().st_ino != before[path]} == {"a"}
    assert artifact.read(out / "a")


def test_several_columns_by_a_service(run: Command, port: int, tmp_path: Path) -> None:
    """With memory low the command joins what the service has tuned; a second run fetches and joins nothing."""
    halves = weights(0).astype(np.float16)  # other data, but the same text to compile
    save_file({"a": halves, "b": 2 * halves}, tmp_path / "net.safetensors")
    out, address = tmp_path / "out", ("--server", f"http://127.0.0.1:{port}", "--verify", "none")
    low = (*H200, "--dtype", "float16", "--memory", "low")
    command = ("tune-model", tmp_path / "net.safetensors", "--n", "1,8", *low, *address, "--out", out)
    first = run(*command, cache=tmp_path / "own")
    assert first.status == 0, first.err
    assert "kernel 4 of 4: b@8\n" in first.err and first.err.count("join: ") == 2
    folders = [f"{name}@{n}" for name in "ab" for n in (1, 8)]
    assert [row.split()[:2] for row in first.out.splitlines()[1:5]] == [one.split("@") for one in folders]
    assert [artifact.read(out / one).manifest["n"] for one in folders] == [1, 8, 1, 8]
    assert [len({(out / f"{name}@{n}" / "kernel.cubin").read_bytes() for n in (1, 8)}) for name in "ab"] == [1, 1]
    before = {path: path.stat().st_ino for path in out.iterdir() if path.is_dir()}
    second = run(*command, cache=tmp_path / "own")
    assert second.status == 0 and "join: " not in second.err and second.out == first.out
    assert before == {path: path.stat().st_ino for path in before}


def test_a_model_with_its_biases_by_a_service(run: Command, port: int, tmp_path: Path) -> None:
    bias = np.linspace(-1, 1, 4, dtype=np.float32)
    tensors = {
        "fc.weight": weights(1),
        "fc.bias": bias,
        "in_proj_weight": weights(2),
        "in_proj_bias": bias.astype(np.float16),
        "plain.weight": weights(1),
        "short.weight": weights(3),
        "short.bias": bias[:3],
        "bad.weight": weights(4),
        "bad.bias": np.full(4, np.nan, np.float32),
    }
    save_file(tensors, tmp_path / "net.safetensors")
    address, out, cache = f"http://127.0.0.1:{port}", tmp_path / "out", tmp_path / "own"
    command = ("tune-model", tmp_path / "net.safetensors", "--n", 16, "--biases", "--server", address, "--json")
    done = run(*command, *H200, "--quiet", "--out", out, cache=cache)
    assert done.status == 6
    layers = {layer["name"]: layer for layer in json.loads(done.out)["layers"]}
    refused = {name: layer["error"]["message"] for name, layer in layers.items() if layer["error"] is not None}
    assert refused == {
        "short.weight": f"{address}: the bias has 3 numbers, and the weights 4 rows",
        "bad.weight": "bias: number 0 is nan, not a finite float32",
    }
    assert done.err == "".join(f"error: layer {name}: {text}\n" for name, text in sorted(refused.items()))
    assert not cache.exists(), "nothing was done here"
    b = np.random.default_rng(0).standard_normal((12, 16)).astype(np.float32)
    for name, added in (("fc.weight", bias), ("in_proj_weight", tensors["in_proj_bias"]), ("plain.weight", None)):
        kernel = lospmm.load(out / layers[name]["folder"])
        assert kernel.manifest["epilogue"] == {"bias": added is not None, "relu": False, "residual": False}
        wanted = tensors[name] @ b + (0 if added is None else added.astype(np.float32)[:, np.newaxis])
        assert np.allclose(kernel.run_on_cpu(b), wanted, atol=1e-4)
    assert layers["fc.weight"]["digest"] != layers["plain.weight"]["digest"]
    here = run(*command[:-2], "", "--json", "--quiet", "--out", tmp_path / "here", *H200, cache=cache)
    told = {one["name"]: one["error"]["message"] for one in json.loads(here.out)["layers"] if one["error"] is not None}
    assert told == {name: text.removeprefix(f"{address}: ") for name, text in refused.items()}
    for name in ("fc.weight", "in_proj_weight", "plain.weight"):
        assert (tmp_path / "here" / name / "kernel.cubin").read_bytes() == (out / name / "kernel.cubin").read_bytes()
    # Without biases the same folder's kernels are made anew where they had one.
    plain = run(*(word for word in command if word != "--biases"), *H200, "--quiet", "--out", out, cache=cache)
    again = {layer["name"]: layer for layer in json.loads(plain.out)["layers"]}
    assert plain.status == 0
    assert [again[name]["digest"] == layers[name]["digest"] for name in ("fc.weight", "plain.weight")] == [False, True]
    assert not lospmm.load(out / again["fc.weight"]["folder"]).manifest["epilogue"]["bias"]


@pytest.mark.slow
def test_a_model_whose_service_is_killed_meanwhile(
    model: Path, tmp_path: Path, slow_toolkit: SlowToolkit, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_WORKERS", 1)
    port, lines = free_port(), []
    address = f"http://127.0.0.1:{port}"
    command = (
        "tune-model",
        model,
        "--n",
        "16",
        *H200,
        "--emitter",
        "ptx",
        "--server",
        address,
        "--out",
        tmp_path / "k",
    )
    with (
        serving(tmp_path, serve_at(port)) as (server, _),
        subprocess.Popen(
            [*COMMAND, *map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client,
    ):
        assert client.stderr is not None and client.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(client.stderr))
        reader.start()
        wait_until(lambda: slow_toolkit.compilations)
        server.send_signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: any(line.startswith(f"waiting for {address}: ") for line in lines))
        slow_toolkit.gate.touch()
        with served(port):
            assert client.wait(120) == 6
        reader.join()
        assert [line.split()[0] for line in client.stdout.read().splitlines()] == [
            "layer",
            "a",
            "b/c",
            "nan",
            "same",
            "N",
        ]
    assert "kernel 1 of 4: a\n" in lines and "kernel 2 of 4: b/c\n" in lines


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_stopped_leaves_its_job(
    matrix: Path, tmp_path: Path, slow_toolkit: SlowToolkit, ending: signal.Signals
) -> None:
    with served() as port:
        address = f"http://127.0.0.1:{port}"
        command = ("tune", matrix, "--n", "16", *H200, "--emitter", "ptx", "--server", address, "--out", tmp_path / "k")
        with subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.DEVNULL) as stopped:
            wait_until(lambda: slow_toolkit.compilations)
            stopped.send_signal(ending)
            assert stopped.wait(120) == 128 + ending
        assert not (tmp_path / "k").exists()
        slow_toolkit.gate.touch()
        assert process(*command).status == 0
        with Client(address) as client:
            (job,) = client.jobs()
            assert job.attempts == 1


def test_weights_held_in_x_out(run: Command, port: int, tmp_path: Path) -> None:
    """The same kernel as of the transposed file: here, by a service, and of a model."""
    address, own = ("--server", f"http://127.0.0.1:{port}"), weights(3)
    (tmp_path / "model").mkdir()
    np.save(tmp_path / "w.npy", own)
    np.save(tmp_path / "model" / "wt.npy", own.T)
    wanted = run("tune", tmp_path / "w.npy", "--n", 16, *H200, "--json", "--out", tmp_path / "k")
    for at, where in enumerate(((), address)):
        one = ("tune", tmp_path / "model" / "wt.npy", "--n", 16, *H200, "--transpose", *where, "--json", "--quiet")
        found = run(*one, "--out", tmp_path / f"k{at}")
        assert json.loads(found.out)["cubin_sha256"] == json.loads(wanted.out)["cubin_sha256"], found.err
        many = ("tune-model", tmp_path / "model", "--n", 16, *H200, "--transpose", *where, "--json", "--quiet")
        (layer,) = json.loads(run(*many, "--out", tmp_path / f"m{at}").out)["layers"]
        assert layer["cubin_sha256"] == json.loads(wanted.out)["cubin_sha256"]
    posted = {"matrix": ("wt.npy", (tmp_path / "model" / "wt.npy").read_bytes())}
    query = "n=16&device=h200&wait=60&transpose=true"
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/kernels?{query}", files=posted, timeout=60)
    assert answer.json()["fingerprint"] == json.loads(wanted.out)["fingerprint"]


def test_a_layer_table_by_a_service_is_that_of_here(run: Command, port: int, tmp_path: Path) -> None:
    """A grouped convolution with a bias, a product and a layer left out: the same report and kernels either way."""
    rng = np.random.default_rng(0)
    window = np.where(rng.random((4, 2, 3, 3)) < 0.5, rng.normal(size=(4, 2, 3, 3)), 0).astype(np.float32)
    bias = np.linspace(-1, 1, 4, dtype=np.float32)
    tensors = {"conv/1.weight": window, "conv/1.bias": bias, "fc.weight": weights(1), "head.weight": weights(2)}
    tensors["line.weight"] = weights(3).reshape(4, 6, 2)
    tensors["fc.dense"] = np.ones((4, 6), np.float32)
    save_file(tensors, tmp_path / "net.safetensors")
    table = {
        "conv/1.weight": {"conv": "2x4x6x6,3x3,padding=1", "groups": 2, "bias": True},
        "fc.*": {"n": 24, "dtype": "float16"},
        "head.weight": {"skip": "its output is small"},
        "line.weight": {"conv": "2x6x1x9,1x2"},
    }
    (tmp_path / "layers.json").write_text(json.dumps({"layers": table}))
    command = ("tune-model", tmp_path / "net.safetensors", "--layers", tmp_path / "layers.json", *H200, "--quiet")
    here = run(*command, "--json", "--out", tmp_path / "here")
    assert here.status == 0, here.err
    there = run(*command, "--json", "--out", tmp_path / "there", "--server", f"http://127.0.0.1:{port}")
    assert (there.status, there.out) == (0, here.out), there.err
    report = json.loads(here.out)
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert (report["n"], layers["conv/1.weight"]["n"], layers["conv/1.weight"]["k"]) == (None, 72, 36)
    assert (layers["fc.weight"]["n"], layers["head.weight"]["skipped"]) == (24, "its output is small")
    assert layers["fc.dense"]["skipped"] == "fewer zeros than the 40% of min_sparsity"
    assert (layers["line.weight"]["k"], layers["line.weight"]["n"]) == (12, 16)
    shown = run(*command, "--out", tmp_path / "here").out
    assert "skipped: its output is small\n" in shown and shown.splitlines()[-1].startswith("all: ")
    refused = run(*command, "--out", tmp_path / "no", "--n", 8, "--biases")
    assert (refused.status, refused.error) == (2, "--layers gives these of each layer: leave out --n, --biases")
    (tmp_path / "layers.json").write_text(json.dumps({"layers": {"*": {"skip": "later"}}}))
    refused = run(*command, "--out", tmp_path / "no")
    assert (refused.status, refused.error) == (2, "no layer is asked for: conv/1.weight: later")
    assert not (tmp_path / "no").exists()
