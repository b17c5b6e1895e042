"""The pages as text: what they show of jobs, models and kernels, what they refuse, and what they let a browser do."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urljoin

import pytest
from fastapi import HTTPException
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadMatrix, ToolchainFault
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.store import Store
from lospmm.toolchain.discover import Toolkit
from lospmm.tuning.options import CHOICES, FAMILY_NAMES
from lospmm_server import manual, uploads
from lospmm_server.faults import Busy, DatabaseFault
from lospmm_server.pages import HEADERS
from lospmm_server.queries import JobRow
from lospmm_server.uploads import NO_GPU
from tests.server.page_reader import BROWSER, Page, page
from tests.server.page_service import (
    HOSTILE,
    NOON,
    FakeView,
    a_model,
    app_of,
    digest_of,
    problem,
    tuned,
)

KERNEL = digest_of("kernel")

#: One of CUDA 12, which compiles for all devices.
TOOLKIT = Toolkit(Path(), Path(), Path(), "12.9", frozenset(one.arch for one in DEVICES.values()), "PATH")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tuned(Store(tmp_path_factory.mktemp("store")))


@pytest.fixture
def view(kernel: Artifact) -> FakeView:
    running = JobRow(
        id=digest_of("running"),
        kind="kernel",
        state="running",
        created=NOON,
        started=NOON,
        stage="compile",
        progress={"reorder": (1, 1), "compile": (12, 64)},
        request={"m": 512, "k": 2048, "nnz": 104_857, "n": 4096, "device": {"name": "h200"}},
    )
    done = JobRow(
        id=KERNEL, kind="kernel", state="succeeded", created=NOON, started=NOON, ended=NOON + timedelta(seconds=12.34)
    )
    failed = JobRow(id=digest_of("failed"), kind="kernel", state="failed", error=problem(f"{HOSTILE}: damaged"))
    model = a_model(KERNEL)
    return FakeView({job.id: job for job in (running, model, done, failed)}, {KERNEL: kernel})


@pytest.fixture
def client(view: FakeView) -> Iterator[TestClient]:
    with TestClient(app_of(view), base_url="http://localhost", raise_server_exceptions=False) as client:
        client.headers.update(BROWSER)
        yield client


def test_jobs_are_listed_with_their_state_and_progress(client: TestClient) -> None:
    found = page(client, "/")
    assert "Kernel " + digest_of("running")[:12] + " running compile 12 of 64 512 x 2,048 4,096 h200" in found.text
    assert f"Model bert {HOSTILE} running compile 4 of 5" in found.text
    assert "2026-01-02 12:00 UTC 12.3 s" in found.text
    assert "3 shown, 2 of them not done yet." in found.text
    assert {"max": "64", "value": "12", "aria-label": "progress of Kernel " + digest_of("running")[:12]} in found.all(
        "progress"
    )
    assert any(attributes.get("data-poll") for attributes in found.all("div"))


def test_jobs_are_filtered_and_paged(client: TestClient) -> None:
    found = page(client, "/")
    older = [link["href"] for link in found.all("a") if link.get("rel") == "next"]
    assert older == ["/?cursor=3"]
    rest = page(client, str(older[0]))
    assert digest_of("failed")[:12] in rest.text and digest_of("running")[:12] not in rest.text
    assert "The matrix file cannot be used" in rest.text
    assert not any(link.get("rel") == "next" for link in rest.all("a"))
    assert "Newest jobs" in rest.text
    only = page(client, "/?state=running")
    assert KERNEL[:12] not in only.text and digest_of("running")[:12] in only.text
    assert [link["href"] for link in only.all("a") if link.get("aria-current") == "true"] == ["/?state=running"]
    assert "There are none that have cancelled." in page(client, "/?state=cancelled").text
    assert not any("data-poll" in attributes for attributes in page(client, "/?state=succeeded").all("div"))


def test_a_job_under_way_says_what_it_does(client: TestClient) -> None:
    job = digest_of("running")
    found = page(client, f"/jobs/{job}")
    assert "Running: compile." in found.text
    assert "512 x 2,048, 104,857 nonzeros" in found.text
    live = next(attributes for attributes in found.all("div") if attributes.get("id") == "live")
    assert live["data-events"] == f"/v1/jobs/{job}/events"
    assert {"progress", "succeeded", "failed", "cancelled", "state"} <= set(str(live["data-kinds"]).split())
    assert [bar["aria-label"] for bar in found.all("progress")] == ["reorder", "compile"]
    status = next(attributes for attributes in found.all("p") if attributes.get("id") == "status")
    assert status["role"] == "status"
    assert f"/jobs/{job}" in [link["href"] for link in found.all("a")]  # for those without the script


def test_a_model_shows_its_layers_with_speedups(client: TestClient) -> None:
    found = page(client, f"/jobs/{digest_of('model')}")
    assert "encoder.0.weight succeeded 512 x 2,048 4,096 104,857 2.50 x" in found.text
    assert "encoder.1.weight succeeded 512 x 2,048 4,096 104,857 0.80 x" in found.text
    assert "encoder.2.weight succeeded 512 x 2,048 4,096 104,857 not timed predicted: 7.85 \u00b5s" in found.text
    assert "encoder.3.weight running 512 x 2,048 4,096 104,857 \u2013 compile" in found.text
    assert f"{HOSTILE} failed" in found.text and f"{HOSTILE}: truncated or damaged archive" in found.text
    fills = [float(str(rect["width"])) for rect in found.all("rect") if rect.get("class") == "fill"]
    assert fills == [100.0, 32.0]
    dense = [path["d"] for path in found.all("path") if path.get("class") == "dense"]
    assert dense == ["M40.0 0v10"] * 2


def test_a_model_that_is_not_timed_has_no_column_of_bars(client: TestClient, view: FakeView) -> None:
    model = digest_of("model")
    assert "Speed-up as a bar" in page(client, f"/jobs/{model}").text
    view.change(model, layers=tuple(replace(layer, speedup=None) for layer in view.found[model].layers))
    assert "Speed-up as a bar" not in page(client, f"/jobs/{model}").text


def test_a_failed_job_says_why_without_trusting_the_words(client: TestClient) -> None:
    found = page(client, f"/jobs/{digest_of('failed')}")
    assert f"The matrix file cannot be used {HOSTILE}: damaged" in found.text
    assert not any("data-events" in attributes for attributes in found.all("div"))


def test_the_form_posts_a_matrix_and_leads_to_its_job(client: TestClient, view: FakeView) -> None:
    form = page(client, "/")
    fields = [*form.all("input"), *form.all("select")]
    assert {field.get("name") for field in fields} == {
        *("matrix", "tensor", "n", "device", "dtype", "values", "families", "layers", "min_sparsity")
    }
    assert sorted(label["for"] or "" for label in form.all("label")) == sorted(field["id"] or "" for field in fields)
    files, asked = {"matrix": ("W.npy", b"a matrix")}, {"device": "h200", "trials": "proxy"}
    response = client.post("/jobs", files=files, data={**asked, "n": "64"}, follow_redirects=False)
    assert response.status_code == 303
    [(name, content, query)] = view.submitted
    assert (name, content, query.n, query.wait) == ("W.npy", b"a matrix", 64, 0.0)
    assert {field: getattr(query, field) for field in asked} == asked
    assert "Queued." in page(client, response.headers["location"]).text


def offered_in(found: Page) -> list[str]:
    """The devices of both forms."""
    others = {*DTYPES, "all", *FAMILY_NAMES, *CHOICES["values"], "full", "proxy"}
    return [value for option in found.all("option") if (value := option["value"] or "") not in others]


def test_the_form_offers_what_the_toolkit_compiles_for(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered() -> list[str]:
        return offered_in(page(client, "/"))

    def none_found() -> None:
        raise ToolchainFault("no CUDA toolkit")

    monkeypatch.setattr(uploads, "settings", lambda: SimpleNamespace(worker_gpu=NO_GPU))
    monkeypatch.setattr(uploads, "find_toolkit", lambda: replace(TOOLKIT, archs=TOOLKIT.archs - {"sm_70"}))
    assert offered() == 2 * [name for name in DEVICES if name != "v100"]
    monkeypatch.setattr(uploads, "find_toolkit", none_found)
    assert offered() == 2 * [*DEVICES], "whoever posts is told"


@pytest.mark.parametrize(
    ("gpu", "offered", "selected"),
    [("h100", ["auto", *DEVICES], []), (NO_GPU, [*DEVICES], ["h200"]), (None, [*DEVICES], ["h200"])],
)
def test_the_form_offers_the_gpu_of_the_service_where_there_is_one(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, gpu: str | None, offered: list[str], selected: list[str]
) -> None:
    """None: what this machine has, which is none. What is timed is asked for where there is a GPU to time it."""
    monkeypatch.setattr(uploads, "find_toolkit", lambda: TOOLKIT)
    monkeypatch.setattr(uploads, "settings", lambda: SimpleNamespace(worker_gpu=gpu))
    monkeypatch.setattr(uploads, "own_gpu", lambda: None)
    found = page(client, "/")
    assert offered_in(found) == 2 * offered, "a matrix and a model"
    assert [one["name"] for one in found.all("select")].count("trials") == (0 if gpu in (NO_GPU, None) else 2)
    assert [option["value"] for option in found.all("option") if "selected" in option] == 2 * selected


@pytest.mark.parametrize(
    ("fields", "files", "status", "words"),
    [
        ({"n": "many"}, {"matrix": b"x"}, 422, "n: Input should be a valid integer"),
        ({}, {"matrix": b"x"}, 422, "n: Field required"),
        ({"n": "0"}, {"matrix": b"x"}, 422, "n: Input should be greater than or equal to 1"),
        ({"n": "1", "more": "1"}, {"matrix": b"x"}, 422, "more: Extra inputs are not permitted"),
        ({"n": "1", **dict.fromkeys("abcdefg", "1")}, {"matrix": b"x"}, 400, "Too many fields"),
        ({"n": "1"}, {"other": b"x"}, 400, "no file was chosen"),
        ({"n": "1"}, {"matrix": b"x", "other": b"x"}, 400, "Too many files"),
    ],
)
def test_a_wrong_form_is_refused_with_a_page(
    client: TestClient, view: FakeView, fields: dict[str, str], files: dict[str, bytes], status: int, words: str
) -> None:
    response = client.post("/jobs", files={name: (name, content) for name, content in files.items()}, data=fields)
    assert (response.status_code, words in Page(response.text).text) == (status, True), response.text
    assert view.submitted == []


def test_what_is_wrong_stands_beside_the_form_with_what_was_typed(client: TestClient, view: FakeView) -> None:
    """And in the other form nothing; a browser keeps no file, so that it has to be chosen again."""
    typed = {"n": "0", "device": "h100", "dtype": "float16", "families": "csr", "tensor": 'a"<b>'}
    response = client.post("/jobs", files={"matrix": ("W", b"x")}, data=typed)
    found = Page(response.text)
    (alert,) = (one for one in found.all("div") if one.get("role") == "alert")
    assert response.status_code == 422 and "n: Input should be greater" in found.text and alert
    values = {one.get("id"): one.get("value") for one in found.all("input")}
    assert (values["matrix-n"], values["model-n"], values["tensor"]) == ("0", "", 'a"<b>')
    selected = [option["value"] for option in found.all("option") if "selected" in option]
    assert selected[:3] == ["h100", "float16", "csr"] and not {"h100", "float16", "csr"} & set(selected[3:])
    view.fault = DatabaseFault("the database is away")
    assert client.post("/jobs", files={"matrix": ("W", b"x")}, data={"n": "8"}).status_code == 503


def test_other_bodies_than_the_form_are_refused(client: TestClient) -> None:
    assert client.post("/jobs", content=b"x").status_code == 400
    assert client.post("/jobs", data={"n": "1"}).status_code == 400


def test_a_page_of_another_site_can_post_nothing(client: TestClient, view: FakeView) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        response = client.post("/jobs", files={"matrix": ("W", b"x")}, data={"n": "1"}, headers=headers)
        assert response.status_code == 403
        assert "The request is not allowed" in Page(response.text).text
        assert response.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    assert view.submitted == []


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (DatabaseFault("the database is away"), 503, "the database is away"),
        (Busy("16 jobs wait"), 429, "16 jobs wait"),
        (HTTPException(401, "send a key", {"WWW-Authenticate": "Basic"}), 401, "send a key"),
        (BadMatrix(f"{HOSTILE}: damaged"), 422, f"{HOSTILE}: damaged"),
        (ValueError("a secret"), 500, "an unexpected error; the log of the service has it"),
    ],
)
def test_faults_look_like_the_rest(
    client: TestClient, view: FakeView, fault: Exception, status: int, words: str
) -> None:
    view.fault = fault
    found = page(client, "/", status)
    assert words in found.text and "secret" not in found.text
    assert "/" in [link["href"] for link in found.all("a")]
    sent = client.get("/").headers
    for name, value in getattr(fault, "headers", {}).items():
        assert sent[name] == value


NOTHING = (
    "/nothing",
    f"/jobs/{'0' * 64}",
    "/jobs/%3Cb%3E",
    f"/kernels/{'0' * 64}",
    "/kernels/0",
    "/static/page.css",
    "/static/..%2fpages.py",
    "/?state=%3Cb%3E",
)


@pytest.mark.parametrize("path", NOTHING)
def test_what_there_is_not(client: TestClient, path: str) -> None:
    assert page(client, path, 404).text.startswith("There is no such thing")
    answer = client.get(path, headers={"Accept": "*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_programs_and_the_rest_interface_get_problems(client: TestClient) -> None:
    assert client.get(f"/v1/kernels/{KERNEL}/cubin").headers["content-type"] == "application/problem+json"
    assert client.get("/?cursor=-1", headers={"Accept": "application/json"}).json()["status"] == 422
    assert client.get("/jobs", headers={"Accept": "garbage"}).headers["content-type"] == "application/problem+json"


def test_what_pages_load_never_changes_under_its_name(client: TestClient) -> None:
    found = page(client, "/")
    [script], links = found.all("script"), found.all("link")
    for url in (script["src"], *(link["href"] for link in links)):
        assert re.fullmatch(r"/static/[a-z]+\.[0-9a-f]{16}\.(css|js|svg)", str(url))
        response = client.get(str(url))
        assert response.headers["cache-control"] == "max-age=31536000, immutable"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-type"].split(";")[0] in ("text/css", "text/javascript", "image/svg+xml")
    assert "http" not in json.dumps([script, links])  # nothing from elsewhere


def test_swagger_ui_comes_from_here(client: TestClient) -> None:
    answer = client.get("/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src")
    urls = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert sum("swagger-ui" in url for url in urls) == 2
    for url in urls:
        assert re.fullmatch(r"/static/[a-z-]+\.[0-9a-f]{16}\.(css|js|svg)", url)
        assert client.get(url).status_code == 200


@pytest.mark.parametrize("name", ["", *manual.files()])
def test_the_manual(client: TestClient, name: str) -> None:
    """Links of the manual lead to its pages and their headings, and images are there."""
    answer = client.get(f"/manual/{name}")
    assert answer.status_code == 200
    if not name.endswith(("md", "/")) and name:
        assert answer.headers["content-type"].startswith("image/")
        return
    found = page(client, f"/manual/{name}")
    assert "style=" not in answer.text
    targets = [str(link["href"]) for link in found.all("a") if "href" in link]
    for target in [*targets, *(str(image["src"]) for image in found.all("img") if "src" in image)]:
        url, _, anchor = urljoin(f"/manual/{name}", target).partition("#")
        if url.startswith("/manual/") and target != "#main":
            file = manual.files()[url.removeprefix("/manual/") or manual.INDEX]
            assert not anchor or f' id="{anchor}"' in manual.html_of(file.name, file.read_text())


def test_the_manual_has_no_other_files(client: TestClient) -> None:
    for name in ("..%2fapp.py", "%2e%2e/server", "nothing.md"):
        assert page(client, f"/manual/{name}", 404).text.startswith("There is no such thing")
    assert "&lt;script&gt;" in manual.html_of(manual.INDEX, "# <script>\n")
    assert "href" not in manual.html_of(manual.INDEX, "[a](../pyproject.toml) [b](javascript:alert(1))\n")


def test_pages_are_no_part_of_the_openapi(view: FakeView) -> None:
    assert set(app_of(view).openapi()["paths"]) == {"/v1/jobs/{job}/events", "/v1/kernels/{digest}/cubin"}


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(min_size=1, max_size=40), detail=st.text(max_size=80))
def test_any_text_stays_text(client: TestClient, view: FakeView, name: str, detail: str) -> None:
    view.change(digest_of("model"), name=name, error=problem(detail), state="failed")
    found = page(client, f"/jobs/{digest_of('model')}")
    assert [attributes["src"] for attributes in found.all("script")] != []
    assert len(found.all("script")) == 1


def test_static_files_and_templates_are_in_the_package() -> None:
    folder = Path(__file__).parents[2] / "server" / "lospmm_server"
    assert {path.name for path in (folder / "static").iterdir()} == {"page.css", "live.js", "icon.svg", "docs.js"}
    for path in (folder / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\bstyle=|<style|\son\w+=|\|\s*safe|autoescape", text), path.name
    assert len((folder / "static" / "live.js").read_text().splitlines()) < 100
