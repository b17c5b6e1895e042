"""The dashboard's queries and the page of metrics, on a real Prometheus."""

import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn
from fastapi import Response
from safetensors.numpy import save

from lospmm_server.access import ObservedApp
from lospmm_server.metrics import MEDIA_TYPE, METRICS, Metrics, QueueFigures
from tests.docs.pages import ROOT
from tests.fixtures import machine_gpu
from tests.fixtures.waiting import wait_until
from tests.gpu.test_bench import gate_library
from tests.server.manifests import batch
from tests.server.processes import SERVE, catches, serving
from tests.server.prometheus import program, scraping, series_of
from tests.server.promql import PANELS, filled

__all__ = ["gate_library"]  # a fixture

#: In place of the window of the dashboard: the whole of a test.
WINDOW = "5m"

EVENTS = batch()
ENDED = sum(kind in ("succeeded", "failed", "cancelled") for kind, _ in EVENTS)

ALL_ENDED = "sum(lospmm_jobs_ended_total)"

#: Of the real batch: layers of a model, and the sizes of each.
LAYERS, M, K, N = 2, 12, 20, 40


@dataclass(frozen=True)
class Batch:
    """Something that has ``/metrics`` at a host and port. ``work`` does a batch job there and returns at its end;
    ``ended`` jobs of kernels have then ended.
    """

    target: str
    work: Callable[[], None]
    ended: int


def _application(figures: Metrics) -> ObservedApp:
    app = ObservedApp(figures)

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(figures.render(QueueFigures(3, 1, 2.5, {"team": 2.5})), media_type=MEDIA_TYPE)

    @app.get("/v1/kernels/{digest}")
    def get_kernel(digest: str) -> str:
        figures.artifact_requested(hit=digest != "new")
        return digest

    return app


@contextmanager
def _served(app: ObservedApp) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def events() -> Iterator[Batch]:
    """The metrics behind a small application, and the events of a batch whose figures are known."""
    figures = Metrics()
    for kind, data in [event for event in EVENTS if event[0] == "queued"]:
        figures.observe(kind, data)
    with _served(_application(figures)) as target, httpx2.Client(base_url=f"http://{target}") as client:

        def work() -> None:
            for kind, data in EVENTS:
                for digest in ("new", "known"):
                    assert client.get(f"/v1/kernels/{digest}").json() == digest
                figures.observe(kind, data)
                time.sleep(0.1)

        client.get("/v1/kernels/known")  # the series of the route is there before the first scrape
        yield Batch(target, work, ENDED)


@pytest.fixture
def service(gate_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """``lospmm serve`` and a worker with an emulated GPU, and two models of as many layers."""
    program()  # where there is no Prometheus, nothing needs to be started
    monkeypatch.setenv("LOSPMM_WORKER_GPU", "h200")
    models = {name: _model(seed) for seed, name in enumerate(("bert", "vit"))}
    url = f"/v1/models?n={N}&device=h200&families=unrolled&cache=cold"  # its clock knows no kernels behind others
    serve = (*SERVE, "--workers", "0")
    with ExitStack() as stack:
        process, port = stack.enter_context(serving(tmp_path, serve))
        stack.enter_context(_emulated_worker(gate_library, tmp_path))
        client = stack.enter_context(httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=330))

        def work() -> None:
            jobs = [client.post(f"{url}&name={name}", content=content) for name, content in models.items()]
            for job in jobs:
                assert job.status_code == 202, job.text
                assert client.get(job.headers["location"], params={"wait": 300}).json()["state"] == "succeeded"
            again = client.post(f"{url}&name=again&wait=10", content=models["bert"])
            assert again.json()["state"] == "succeeded"

        yield Batch(f"127.0.0.1:{port}", work, ended=len(models) * LAYERS)
        assert process.poll() is None


def _model(seed: int) -> bytes:
    """A .safetensors of LAYERS layers."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(LAYERS, M, K)) * (rng.random((LAYERS, M, K)) < 0.3)
    return save({f"layer{number}": layer for number, layer in enumerate(dense.astype(np.float32))})


@contextmanager
def _emulated_worker(gate: Path, directory: Path) -> Iterator[None]:
    sizes = [str(size) for size in (M, K, N)]
    libraries = fake_libraries(directory)
    command = [sys.executable, "-m", "tests.server.emulated_worker", str(gate), str(libraries), *sizes]
    with (directory / "worker.log").open("w") as stream:
        worker = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: catches(worker.pid, signal.SIGTERM))
        yield
        worker.terminate()
        assert worker.wait(120) == 128 + signal.SIGTERM
    finally:
        worker.kill()
        worker.wait()


def fake_libraries(directory: Path) -> Path:
    """Something for the emulated GPU to take for cuBLAS and cuSPARSE. Skips the test without gcc."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc: apt-get install gcc")
    library, source = directory / "libfake.so", Path(machine_gpu.__file__).with_name("fake_libraries.c")
    command = [compiler, "-shared", "-fPIC", "-DSTREAM=0", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


@pytest.mark.slow
def test_every_panel_has_data_of_a_batch_job(service: Batch, tmp_path: Path) -> None:
    """A real service, a real batch job, a real Prometheus; the GPU is emulated."""
    with scraping(service.target, tmp_path) as prometheus:
        service.work()
        prometheus.wait_for(ALL_ENDED, lambda values: values == [service.ended])
        prometheus.wait_for_scrape()
        for panel in PANELS:
            for target in panel["targets"]:
                found = prometheus.query(filled(target["expr"], window=WINDOW))
                assert found, f"{panel['title']}: no data: {target['expr']}"
                # Some lines may stand for what did not happen, such as the percentiles of an idle route.
                assert not all(isnan(value) for _, value in found), f"{panel['title']}: {found}"
        arrived = {labels["__name__"] for labels, _ in prometheus.query('{__name__=~"lospmm_.*"}')}
        assert arrived == {series for metric in METRICS.values() for series in series_of(metric)}
        timed = prometheus.query('sum(lospmm_speedup_over_dense_count{dense="fp32"})')
        assert timed == [({}, float(service.ended))]
    served = logged(*tmp_path.glob("serve*.log"), besides="lospmm serves ")
    requests = [line for line in served if line["event"] == "request"]
    assert [line["status"] for line in requests if line["route"] == "/v1/models"] == [202, 202, 201]
    assert len({line["request_id"] for line in requests}) == len(requests)
    ends = [line for line in logged(tmp_path / "worker.log") if "succeeded" in line["event"]]
    assert len({line["job_id"] for line in ends}) == service.ended


def logged(file: Path, *, besides: str = "\n") -> list[dict[str, Any]]:
    """The lines of a log, every one of them JSON but those that begin with ``besides``."""
    return [json.loads(line) for line in file.read_text().splitlines() if not line.startswith(besides)]


@pytest.mark.slow
def test_figures_of_the_panels(events: Batch, tmp_path: Path) -> None:
    """What the panels say of the batch is what was in it."""
    queries = {panel["title"]: filled(panel["targets"][0]["expr"], window=WINDOW) for panel in PANELS}
    with scraping(events.target, tmp_path) as prometheus:
        events.work()
        prometheus.wait_for(ALL_ENDED, lambda values: values == [events.ended])
        prometheus.wait_for_scrape()

        def answer(title: str, label: str = "") -> dict[str, float]:
            return {labels.get(label, ""): value for labels, value in prometheus.query(queries[title])}

        near = 0.05  # Prometheus extrapolates to the ends of the window
        assert answer("Queued") == {"": 3}
        assert answer("Cache hits")[""] == pytest.approx(0.5, rel=near)
        assert answer("Failed")[""] == pytest.approx(1 / ENDED, rel=near)
        assert answer("Search space after each constraint", "step") == pytest.approx(
            {"space": 64, "after_registers": 38, "after_utilization": 12, "after_balance": 6}, rel=near
        )
        assert answer("Queue age by key", "key") == {"none": 0, "team": 2.5}
        assert answer("Time by stage", "stage")["measure_trials"] == pytest.approx(1.7, rel=near)
        assert 2.5 < answer("Tuning time by model", "model")["bert"] <= 5
        assert answer("Ranker hits", "place") == pytest.approx({"first": 0, "shortlist": 1, "neighbour": 0})
        speedups = answer("Speed-up of what was tuned", "dense")
        assert {name: value for name, value in speedups.items() if not math.isnan(value)} == pytest.approx(
            {"fp32": 2.6, "tf32": 0.9}, rel=near
        )
        assert answer("Faster than dense fp32")[""] == pytest.approx(1)
        assert answer("Failures", "reason")["toolchain-fault"] > 0
        assert answer("GPU use")[""] > 0


def test_promtool_finds_nothing_wrong_with_the_page() -> None:
    figures = Metrics()
    for kind, data in EVENTS:
        figures.observe(kind, data)
    figures.request_served("/v1/kernels", "POST", 201, 0.5)
    page = figures.render(QueueFigures(3, 1, 2.5))
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_promtool_finds_nothing_wrong_with_the_configuration() -> None:
    file = ROOT / "docker" / "prometheus.yml"
    command = [program("promtool"), "check", "config", "--syntax-only", str(file)]  # its key is in the container
    checked = subprocess.run(command, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode()
