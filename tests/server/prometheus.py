"""A real Prometheus that scrapes one address, for the length of a test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lospmm_server.metrics import Metric

VARIABLE = "LOSPMM_TEST_PROMETHEUS"

#: Between two scrapes.
INTERVAL = "500ms"

_CONFIGURATION = """
global:
  scrape_interval: {interval}
  scrape_timeout: {interval}
scrape_configs:
  - job_name: lospmm
    static_configs:
      - targets: ["{target}"]
"""


def series_of(metric: Metric) -> set[str]:
    """Names of its series in queries."""
    is_histogram = metric.type == "histogram"
    return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")} if is_histogram else {metric.name}


def program(name: str = "prometheus") -> str:
    """The path of prometheus, or of promtool beside it. Skips the test where there is none."""
    if (named := os.environ.get(VARIABLE)) is not None:
        file = Path(named).with_name(name)
        assert os.access(file, os.X_OK), f"{VARIABLE}: {file} is no program"
        return str(file)
    if (found := shutil.which(name)) is None:
        pytest.skip(f"no {name}: apt-get install prometheus, or name the program of prometheus in {VARIABLE}")
    return found


@dataclass(frozen=True)
class Prometheus:
    client: httpx2.Client

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series, as of now."""
        answer = self.client.get("/api/v1/query", params={"query": text}).json()
        assert answer["status"] == "success", (text, answer)
        data = answer["data"]
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(found["metric"], float(found["value"][1])) for found in data["result"]]

    def wait_for(self, text: str, holds: Callable[[list[float]], bool], seconds: float = 30) -> None:
        """Until ``holds`` is true of the values of a query."""
        deadline = time.monotonic() + seconds
        while not holds(values := [value for _, value in self.query(text)]):
            assert time.monotonic() < deadline, f"{text}: {values} after {seconds} s"
            time.sleep(0.1)

    def wait_for_scrape(self) -> None:
        """Until what the service says now has been read."""
        scraped = "max(timestamp(up == 1))"
        self.wait_for(scraped, bool)
        before = max(value for _, value in self.query(scraped))
        for _ in range(2):  # the first may have been under way
            self.wait_for(scraped, lambda values, before=before: bool(values) and values[0] > before)
            before = max(value for _, value in self.query(scraped))


@contextmanager
def scraping(target: str, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped ``target``, a host and port. Skips the test where there is no Prometheus."""
    executable = program()
    directory.mkdir(parents=True, exist_ok=True)
    configuration, log = directory / "prometheus.yml", directory / "prometheus.log"
    configuration.write_text(_CONFIGURATION.format(interval=INTERVAL, target=target))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [
        executable,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        with httpx2.Client(base_url=f"http://{address}", timeout=10) as client:
            _wait_until_ready(client, process, log)
            prometheus = Prometheus(client)
            prometheus.wait_for("up", lambda values: values == [1.0])
            yield prometheus
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(client: httpx2.Client, process: Any, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
