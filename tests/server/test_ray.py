"""A worker on a Ray cluster: three nodes on this machine, each with a cache of its own and room for one job."""

import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import sqlalchemy as sa

from lospmm.artifact import kept
from lospmm.errors import BadRequest
from lospmm.settings import settings
from lospmm.store import Store
from lospmm_server import queue
from lospmm_server.keys import NOBODY
from lospmm_server.queue import KernelOrder
from lospmm_server.tables import kernels
from tests.fixtures.waiting import wait_until
from tests.server.conftest import SlowToolkit, make_slow_toolkit, new_service, npy_file
from tests.server.processes import WORKER, client_at, compilers
from tests.server.ray_cluster import IS_INSTALLED, MISSING, Nodes, ray_nodes
from tests.server.served import served

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason=MISSING)

POST = "/v1/kernels?n=16&device=h200&wait=0"

NODES = ("first", "second", "third")


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowToolkit]:
    """Of all nodes."""
    slow = make_slow_toolkit(tmp_path_factory.mktemp("slow"))
    yield slow
    slow.gate.touch()


@pytest.fixture(scope="module")
def cluster(toolkit: SlowToolkit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, str]]:
    with ray_nodes(tmp_path_factory.mktemp("nodes"), LOSPMM_TOOLKIT=toolkit.root) as nodes:
        (address, *_) = [nodes.add(name) for name in NODES]
        yield nodes, address


@pytest.fixture
def closed(toolkit: SlowToolkit) -> SlowToolkit:
    """Its compilers wait."""
    toolkit.gate.unlink(missing_ok=True)
    toolkit.log.unlink(missing_ok=True)
    return toolkit


@contextmanager
def working_on(address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the cluster, as users start it."""
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, *WORKER, "--ray", address], stderr=stream)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(120) in (128 + signal.SIGTERM, -signal.SIGKILL), log.read_text()


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    """Of a service without workers of its own."""
    with served(workers=0) as port, client_at(port) as client:
        yield client


def ended(client: httpx2.Client, location: str) -> dict[str, Any]:
    """The job or model, which one request waits for at most 60 s."""
    wait_until(lambda: client.get(f"{location}?wait=60").json()["state"] not in ("queued", "running"))
    return client.get(location).json()


def stages_of(client: httpx2.Client, model: str) -> list[str | None]:
    return [layer["stage"] for layer in client.get(model).json()["layers"]]


@pytest.mark.slow
def test_a_model_on_three_nodes_one_of_which_is_killed(
    cluster: tuple[Nodes, str], client: httpx2.Client, closed: SlowToolkit, tmp_path: Path
) -> None:
    nodes, address = cluster
    files = [("matrix", (f"layer{seed}.npy", npy_file(seed))) for seed in range(6)]
    model = client.post("/v1/models?n=16&device=h200&name=net&wait=0", files=files).headers["location"]
    with working_on(address, tmp_path / "log"):
        wait_until(lambda: len(compilers(closed.log)) >= 3 and closed.compilations == 3)
        running = [layer for layer in client.get(model).json()["layers"] if layer["state"] == "running"]
        assert len(running) == 3
        wait_until(lambda: stages_of(client, model).count("compile") == 3)
        nodes.kill("second")
        wait_until(lambda: closed.compilations == 4 or len(compilers(closed.log)) == 2)
        closed.gate.touch()
        found = ended(client, model)
    assert [layer["state"] for layer in found["layers"]] == ["succeeded"] * 6, (tmp_path / "log").read_text()
    attempts = [client.get(layer["job"]).json()["attempts"] for layer in found["layers"]]
    assert sorted(attempts) == [1, 1, 1, 1, 1, 2]
    here = Store(settings().cache_dir)
    for layer in found["layers"]:
        kernel = client.get(layer["kernel"]).json()
        assert kernel["verified"]["on"] == "cpu"
        assert kept.find(kernel["digest"], here) is not None
    assert not here.verify()
    for name in ("first", "third"):
        assert (nodes.folder / name / kept.KERNELS).is_dir()  # made there, in no common folder
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum("is lost" in line["event"] for line in lines) == 1
    assert {name for line in lines for name in line} <= {"time", "level", "event", "logger", "job_id"}
    nodes.add("second")


def tasks() -> list[psutil.Process]:
    """Without those that were killed and not yet waited for, and without a child that a task has just forked, which has
    its name until it runs another program."""
    named = [
        process
        for process in psutil.process_iter(["name", "ppid", "status"])
        if process.info["name"] == "ray::tune_there" and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    own = {process.pid for process in named}
    return [process for process in named if process.info["ppid"] not in own]


@pytest.mark.slow
def test_a_job_that_kills_its_processes_is_given_up(
    cluster: tuple[Nodes, str],
    client: httpx2.Client,
    closed: SlowToolkit,
    tmp_path: Path,
    set_environment: Callable[[str, object], None],
) -> None:
    set_environment("LOSPMM_MAX_ATTEMPTS", 2)
    job = client.post(POST, content=npy_file(40)).headers["location"]
    with working_on(cluster[1], tmp_path / "log"):
        for attempt in (1, 2):
            wait_until(lambda attempt=attempt: closed.compilations == attempt and len(tasks()) == 1)
            (task,) = tasks()
            task.kill()
        found = ended(client, job)
    assert (found["state"], found["attempts"], found["error"]["type"]) == ("failed", 2, "/problems/gave-up")
    wait_until(lambda: not compilers(closed.log))


@pytest.mark.slow
def test_cancel_kills_the_task_and_its_compilers_and_faults_are_told(
    cluster: tuple[Nodes, str], client: httpx2.Client, closed: SlowToolkit, tmp_path: Path
) -> None:
    job = client.post(POST, content=npy_file(10)).headers["location"]
    with working_on(cluster[1], tmp_path / "log"):
        wait_until(lambda: compilers(closed.log))
        assert client.delete(job).json()["cancelling"]
        wait_until(lambda: not compilers(closed.log) and not tasks())
        assert ended(client, job)["state"] == "cancelled"
        closed.gate.touch()
        again = client.post(POST, content=npy_file(10)).headers["location"]
        assert (again, ended(client, job)["state"]) == (job, "succeeded")
        order_of_another_version()
        other = ended(client, f"/v1/jobs/{'0' * 64}")
    assert other["state"] == "failed"
    assert other["error"]["detail"].startswith("this worker has another version of lospmm")
    assert "\n" not in other["error"]["detail"]  # what Ray tells of its tasks has many lines


def order_of_another_version() -> None:
    """Queue the only request again, under a digest that this version would not give it."""
    database = new_service().database
    with database.read() as connection:
        request = connection.execute(sa.select(kernels.c.request)).scalar_one()
    queue.submit(database, KernelOrder("0" * 64, request, ""), NOBODY)
    database.close()


@pytest.mark.slow
def test_a_worker_that_ends_leaves_nothing_running(
    cluster: tuple[Nodes, str],
    client: httpx2.Client,
    closed: SlowToolkit,
    tmp_path: Path,
) -> None:
    job = client.post(POST, content=npy_file(20)).headers["location"]
    with working_on(cluster[1], tmp_path / "log") as worker:
        wait_until(lambda: compilers(closed.log))
        worker.kill()
        worker.wait(120)
        wait_until(lambda: not compilers(closed.log))
    found = client.get(job).json()
    assert (found["state"], found["attempts"]) == ("running", 1)


class _Silent(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def refusal(address: str) -> str:
    from lospmm_server.ray_cluster import connect

    with pytest.raises(BadRequest) as refused:
        connect(address)
    return str(refused.value)


def test_an_address_without_a_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert f"--ray 127.0.0.1:{port}: no cluster answers (Connection refused)" in refusal(f"127.0.0.1:{port}")
    for address in ("nonsense", "ray://127.0.0.1:10001"):
        assert f"--ray {address}: expected HOST:PORT" in refusal(address)


def test_an_address_of_something_else(web_server: int) -> None:
    assert "something other than a Ray cluster answers there" in refusal(f"127.0.0.1:{web_server}")


@pytest.mark.slow
def test_a_machine_without_ray() -> None:
    program = "import sys; sys.modules['ray'] = None; from lospmm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "worker", "--ray", "auto"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line == "error: --ray needs Ray: pip install 'lospmm[ray]'"


def test_slots_of_a_node() -> None:
    from lospmm_server.ray_cluster import Node
    from lospmm_server.ray_worker import slots_of

    def slots(cores: float, gpus: int, gpu: str) -> list[tuple[int, str, float]]:
        return [(slot.number, slot.gpu, slot.cores) for slot in slots_of(Node("a" * 40, "host", cores, gpus), gpu)]

    assert slots(32, 2, "h200") == [(0, "h200", 16), (1, "h200", 16)]
    assert slots(1, 2, "h200") == [(0, "h200", 0.5), (1, "h200", 0.5)]
    assert slots(9, 0, "") == [(0, "", 4.5), (1, "", 4.5)]
    assert slots(8, 2, "") == [(0, "", 4), (1, "", 4)]  # GPUs that the device table does not know
    assert slots(1, 0, "") == [(0, "", 1)]
    assert slots(0, 0, "") == slots(0, 1, "") == []
