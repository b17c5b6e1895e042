"""What processes of the service log, and what of a request is logged and counted."""

import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from fastapi import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from lospmm_server import logs
from lospmm_server.access import HEADER, ObservedApp
from lospmm_server.logs import about_job, about_request
from lospmm_server.metrics import Metrics, QueueFigures
from tests.server.test_metrics import read

Lines = Callable[[], list[dict[str, Any]]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The logging of the test runner."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in logs.QUIET}
    root.handlers = []  # ``configure`` closes those that it finds
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.fixture
def lines() -> Lines:
    stream = io.StringIO()
    logs.configure(stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.fixture
def as_ray_logs() -> Iterator[None]:
    """Ray adds a time to every record of a process that imports it."""
    before = logging.getLogRecordFactory()

    def made(*arguments: object, **named: object) -> logging.LogRecord:
        record = before(*arguments, **named)
        record.__dict__["_ray_timestamp_ns"] = 1
        return record

    logging.setLogRecordFactory(made)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("as_ray_logs")
def test_a_line_of_the_standard_library(lines: Lines) -> None:
    logging.getLogger("lospmm.somewhere").warning("%d of %s", 3, "them", extra={"color_message": "as uvicorn adds it"})
    (line,) = lines()
    spoken = datetime.fromisoformat(line.pop("time"))
    assert abs((datetime.now(UTC) - spoken).total_seconds()) < 60
    assert line == {"event": "3 of them", "level": "warning", "logger": "lospmm.somewhere"}


def test_a_line_with_figures(lines: Lines) -> None:
    structlog.stdlib.get_logger("lospmm_server.worker").info("kept", seconds=0.5, names=["a"])
    (line,) = lines()
    assert (line["event"], line["seconds"], line["names"]) == ("kept", 0.5, ["a"])
    assert (line["logger"], line["level"]) == ("lospmm_server.worker", "info")


def test_ids_of_requests_and_jobs_are_in_every_line_of_the_block(lines: Lines) -> None:
    log = logging.getLogger("lospmm.tuning.jobs")
    with about_request("r1"), about_job("j1"):
        log.info("both")
        with about_job("j2"):
            log.info("inner")
        log.info("outer")
    log.info("none")
    ids = [(line.get("request_id"), line.get("job_id")) for line in lines()]
    assert ids == [("r1", "j1"), ("r1", "j2"), ("r1", "j1"), (None, None)]


def test_threads_have_jobs_of_their_own(lines: Lines) -> None:
    ready = threading.Barrier(2)

    def work(job: str) -> None:
        with about_job(job):
            ready.wait(5)
            logging.getLogger("worker").info(job)
            ready.wait(5)

    threads = [threading.Thread(target=work, args=(job,)) for job in ("j1", "j2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    found = lines()
    assert {line["event"] for line in found} == {"j1", "j2"}
    assert all(line["event"] == line["job_id"] for line in found)


def test_a_traceback_is_part_of_its_line(lines: Lines) -> None:
    try:
        raise ValueError("of no use")
    except ValueError:
        logging.getLogger("lospmm").exception("it failed")
    (line,) = lines()
    assert line["event"] == "it failed"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: of no use")


def test_what_is_no_json_is_written_all_the_same(lines: Lines) -> None:
    structlog.stdlib.get_logger("x").info("odd", thing=object, half="\ud800", line="a\nb")
    (line,) = lines()
    assert (line["half"], line["line"]) == ("\ud800", "a\nb")


def test_warnings_are_lines(lines: Lines) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [line["logger"] for line in lines()] == ["py.warnings"]


def test_libraries_that_say_too_much_are_quiet(lines: Lines) -> None:
    logging.getLogger("httpx2").info("HTTP Request")
    logging.getLogger("alembic.runtime.migration").info("Running upgrade")
    logging.getLogger("alembic").error("broken")
    assert [line["event"] for line in lines()] == ["broken"]


def test_setting_up_again_replaces_what_was(lines: Lines) -> None:
    second = io.StringIO()
    logger = structlog.stdlib.get_logger("early")
    logger.info("first")
    logs.configure(second)
    logger.info("second")
    logging.getLogger("late").info("third")
    assert [line["event"] for line in lines()] == ["first"]
    assert [json.loads(line)["event"] for line in second.getvalue().splitlines()] == ["second", "third"]


def test_a_person_gets_text_that_cannot_move_the_cursor() -> None:
    stream = Terminal()
    logs.configure(stream)
    with about_job("j1"):
        structlog.stdlib.get_logger("x").info("hello", name="\x1b[2Jevil")
    logging.getLogger("x").warning("also \x07 this")
    text = stream.getvalue()
    assert "hello" in text and "j1" in text and r"\x1b[2Jevil" in text and r"also \x07 this" in text
    assert "\x1b[2J" not in text and "\x07" not in text
    with pytest.raises(ValueError):
        json.loads(text.splitlines()[0])


def test_a_traceback_for_a_person_does_not_show_variables() -> None:
    stream = Terminal()
    logs.configure(stream)
    key = "top" + "secret"
    try:
        raise ValueError(len(key))
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "Traceback" in stream.getvalue() and "topsecret" not in stream.getvalue()


@pytest.fixture
def app() -> ObservedApp:
    app = ObservedApp(Metrics())

    @app.get("/things/{name}")
    def get_thing(name: str) -> str:
        logging.getLogger("inside").info("looking for %s", name)
        match name:
            case "teapot":
                raise HTTPException(404, "no tea")
            case "bomb":
                raise RuntimeError("boom")
        return name

    @app.get("/healthz")
    def get_health(request: Request) -> Response:
        return JSONResponse("ok", 503 if "sick" in request.url.query else 200)

    @app.exception_handler(Exception)
    async def fail(_request: Request, _error: Exception) -> Response:
        return JSONResponse({"type": "/problems/internal"}, 500)

    return app


@pytest.fixture
def client(app: ObservedApp) -> TestClient:
    return TestClient(app)


def requests_of(app: ObservedApp) -> dict[tuple[str, str, str], float]:
    """Requests counted, by route, method and status."""
    page = read(app.metrics.render(QueueFigures(0, 0, 0.0)))
    return {
        (found["route"], found["method"], found["status"]): value
        for (name, labels), value in page.items()
        if name == "lospmm_requests_total"
        for found in [dict(labels)]
    }


def test_a_request_is_a_line_and_a_count(client: TestClient, app: ObservedApp, lines: Lines) -> None:
    answer = client.get("/things/one?key=hidden")
    inside, line = lines()
    assert inside["request_id"] == line["request_id"] == answer.headers[HEADER]
    assert inside["event"] == "looking for one"
    assert 0 <= line.pop("seconds") < 5
    del line["time"], line["request_id"]
    assert line == {
        "event": "request", "level": "info", "logger": "lospmm_server.access",
        "method": "GET", "path": "/things/one", "route": "/things/{name}", "status": 200,
    }  # fmt: skip
    assert requests_of(app) == {("/things/{name}", "GET", "200"): 1}


def test_every_request_has_an_id_of_its_own(client: TestClient) -> None:
    ids = {client.get("/things/one").headers[HEADER] for _ in range(20)}
    assert len(ids) == 20


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("a1-b2_c.3", True), ("a" * 64, True), ("a" * 65, False), ("", False), ("a b", False), ("a\u00e9", False)],
)
def test_an_id_from_outside(client: TestClient, lines: Lines, given: str, *, is_kept: bool) -> None:
    answer = client.get("/things/one", headers={HEADER: given.encode("latin-1")})
    assert (answer.headers[HEADER] == given) == is_kept
    assert all(line["request_id"] == answer.headers[HEADER] for line in lines())


def test_a_fault_is_answered_logged_once_with_its_id_and_counted(
    client: TestClient, app: ObservedApp, lines: Lines
) -> None:
    answer = client.get("/things/bomb")
    assert (answer.status_code, answer.json()) == (500, {"type": "/problems/internal"})
    _, fault, line = lines()
    assert "RuntimeError: boom" in fault["exception"]
    assert fault["request_id"] == line["request_id"] == answer.headers[HEADER]
    assert line["status"] == 500
    assert requests_of(app) == {("/things/{name}", "GET", "500"): 1}


def test_paths_of_clients_are_no_labels(client: TestClient, app: ObservedApp) -> None:
    for number in range(200):
        client.get(f"/no/{number}")
    client.request("BREW", "/things/one")
    assert client.get("/things/teapot").status_code == 404
    assert requests_of(app) == {
        ("other", "GET", "404"): 200,
        ("/things/{name}", "other", "405"): 1,
        ("/things/{name}", "GET", "404"): 1,
    }


def test_a_path_is_short_and_printable_in_the_log(client: TestClient, lines: Lines) -> None:
    client.get("/no/%0a%1b[2J" + "x" * 5000)
    (line,) = lines()
    assert line["path"].startswith("/no/%0A%1B%5B2J")
    assert len(line["path"]) < 700


def test_checks_of_health_are_counted_and_logged_where_they_fail(
    client: TestClient, app: ObservedApp, lines: Lines
) -> None:
    client.get("/healthz")
    assert lines() == []
    client.get("/healthz?sick")
    assert [line["status"] for line in lines()] == [503]
    assert requests_of(app) == {("/healthz", "GET", "200"): 1, ("/healthz", "GET", "503"): 1}
