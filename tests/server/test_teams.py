"""Teams: what one has posted, nothing tells another of."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient

from lospmm.settings import settings
from lospmm_server import keys, queries, queue
from lospmm_server.database import Database, open_database
from lospmm_server.faults import DatabaseFault
from lospmm_server.keys import Caller, Terms
from lospmm_server.pages import Pages, pages_router
from lospmm_server.queue import JobVerdict
from lospmm_server.service_view import ServiceView
from tests.fixtures.files import saved
from tests.server.conftest import client_of, new_service, npy_file, weights, working
from tests.server.orders import claimed, model, order
from tests.server.served import served

A, B = (Caller(name, terms=Terms(team=name)) for name in ("a", "b"))

#: Routes that have a parameter and tell nothing of jobs.
OF_NOBODY = ("/static/{name}", "/manual/{name:path}")

Headers = Mapping[str, str]


class Posted:
    """A service with a finished kernel and a finished model of team a; each team's key as headers."""

    def __init__(self, client: TestClient, database: Database) -> None:
        self.client = client
        made = {"a": ["team=a"], "b": ["team=b"], "auditor": ["team=b", "shared"], "everybody": []}
        self.keys: Mapping[str, Headers] = {
            name: {"Authorization": f"Bearer {keys.add(database, name, terms)}"} for name, terms in made.items()
        }
        self.kernel = self.post("a", 1).json()["digest"]
        self.model = self.post_model("a").json()["id"]

    def post(self, who: str, seed: int) -> httpx2.Response:
        return self.client.post("/v1/kernels?n=64&device=h200&wait=60", content=npy_file(seed), headers=self.keys[who])

    def post_model(self, who: str) -> httpx2.Response:
        layers = {"fc": weights(2), "head": weights(3)}
        files = [("matrix", (f"{name}.npy", saved(np.save, dense))) for name, dense in layers.items()]
        return self.client.post(
            "/v1/models?n=64&device=h200&wait=60&name=secret-net", files=files, headers=self.keys[who]
        )

    def get(self, who: str, path: str) -> httpx2.Response:
        return self.client.get(path, headers=self.keys[who])


@pytest.fixture(scope="module")
def posted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Posted]:
    """For tests that change nothing of the kernel, the model, or what team b has of them."""
    with _posted(tmp_path_factory.mktemp("teams")) as found:
        yield found


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Posted]:
    with _posted(tmp_path) as found:
        yield found


@contextmanager
def _posted(folder: Path) -> Iterator[Posted]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_CACHE_DIR", str(folder))
        patch.setattr(keys, "REFRESH_SECONDS", -1.0)
        settings.cache_clear()
        service = new_service(asks_for_keys=True)
        with working(), client_of(service) as client:
            yield Posted(client, service.database)
        patch.undo()
        settings.cache_clear()


def routes_with_ids(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path with a parameter: those of the OpenAPI, and the pages."""
    described = [
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods if "{" in path
    ]
    pages = pages_router(Pages(), ServiceView(app.state.service)).routes
    others = [
        (method, route.path)
        for route in pages
        if isinstance(route, Route) and "{" in route.path and route.path not in OF_NOBODY
        for method in route.methods or ()
    ]
    found = dict.fromkeys([*described, *others])
    return [*found, *(("HEAD", path) for method, path in found if method == "GET")]


def test_every_route_with_an_id_is_404_to_another_team(posted: Posted) -> None:
    """And says the same as of an id that nobody has; so it is to team a, but not for all parts of a thing."""
    app = posted.client.app
    assert isinstance(app, FastAPI)
    found = routes_with_ids(app)
    assert {path for _, path in found} >= {"/v1/kernels/{digest}/cubin", "/v1/jobs/{id}/events", "/jobs/{job}/cancel"}
    for method, path in found:
        name = path.partition("{")[2].partition("}")[0]
        statuses = []
        for one in (posted.kernel, posted.model):
            url = path.replace(f"{{{name}}}", one) + ("?other=" + one if path.endswith("/beside") else "")
            answers = [
                posted.client.request(method, url.replace(one, asked), headers=posted.keys["b"])
                for asked in (one, "0" * 64)
            ]
            assert [answer.status_code for answer in answers] == [404, 404], (method, path)
            assert answers[0].text.replace(one, "0" * 64) == answers[1].text, (method, path)
            statuses.append(posted.client.request(method, url, headers=posted.keys["a"]).status_code)
        assert min(statuses) < 404 or path.endswith("/bias"), (method, path)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs?state=succeeded", "/", "/?state=succeeded"])
def test_lists_are_of_the_own_team(posted: Posted, path: str) -> None:
    for who, sees in (("a", True), ("b", False), ("auditor", True), ("everybody", True)):
        text = posted.get(who, path).text
        assert [one in text for one in (posted.kernel, posted.model, "secret-net")] == [sees] * 3, who


def test_who_posts_the_matrix_finds_its_kernel(fresh: Posted) -> None:
    """At once, and hears nothing of the other's model; its own model is another job."""
    first = fresh.post("a", 4).json()["digest"]
    assert fresh.get("b", f"/v1/kernels/{first}").status_code == 404
    again = fresh.post("b", 4)
    assert (again.status_code, again.json()["digest"]) == (201, first)
    assert fresh.get("b", f"/v1/kernels/{first}/cubin").content == fresh.get("a", f"/v1/kernels/{first}/cubin").content
    assert first in fresh.get("b", "/v1/jobs").text
    layer = fresh.post("b", 2).json()["digest"]
    told = [fresh.get(who, f"/v1/jobs/{layer}/events").text for who in ("a", "b", "auditor")]
    assert ["event: succeeded" in text for text in told] == [True] * 3
    assert ["secret-net" in text for text in told] == [False, False, True]  # to team a, of the kernel alone
    own = fresh.post_model("b").json()
    assert (own["id"] != fresh.model, own["state"]) == (True, "succeeded")
    assert fresh.get("a", f"/v1/jobs/{own['id']}").status_code == 404


def test_a_shared_key_sees_everything_and_posts_for_its_team(posted: Posted) -> None:
    digest = posted.post("auditor", 5).json()["digest"]
    assert [posted.get(who, f"/v1/kernels/{digest}").status_code for who in ("a", "b")] == [404, 200]
    assert posted.get("auditor", f"/v1/jobs/{posted.model}").status_code == 200


def test_a_found_kernel_outlasts_its_job(fresh: Posted) -> None:
    service = fresh.client.app.state.service
    with service.database.write() as connection:
        connection.execute(queries.kernels.delete().where(queries.kernels.c.digest == fresh.kernel))
    for path in (f"/v1/kernels/{fresh.kernel}", f"/v1/jobs/{fresh.kernel}"):
        assert [fresh.get(who, path).status_code for who in ("a", "b")] == [200, 404]


def test_what_a_team_has_found_it_finds_without_the_database(posted: Posted, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = posted.post("a", 6).json()["digest"]
    monkeypatch.setattr(queries, "is_of_team", Mock(side_effect=DatabaseFault("gone")))
    assert [posted.get(who, f"/v1/kernels/{digest}/cubin").status_code for who in ("a", "b")] == [200, 503]


class TestCancel:
    """Of a kernel that two teams want, on SQLite and on PostgreSQL."""

    @pytest.fixture
    def database(self, either_database: Database) -> Database:
        for caller in (A, B):
            queue.submit(either_database, order(1), caller)
        return either_database

    def states(self, database: Database, job: str = order(1).digest) -> list[str | None]:
        found = [queries.find_job(database, job, team) for team in ("a", "b", None)]
        return [None if job is None else job.state for job in found]

    def test_it_ends_for_the_one_and_goes_on_for_the_other(self, database: Database) -> None:
        mine = claimed(database)
        assert queue.cancel(database, mine.digest, "a")
        assert self.states(database) == ["cancelled", "running", "running"]
        for state, listed in (("cancelled", [1, 0]), ("running", [0, 1])):
            assert [len(queries.list_jobs(database, state, None, 50, team)) for team in ("a", "b")] == listed
        assert queue.look(database, mine) is JobVerdict.GO_ON
        assert queue.cancel(database, mine.digest, "b")
        assert queue.look(database, mine) is JobVerdict.CANCEL
        queue.give_back(database, mine)
        assert self.states(database) == ["cancelled"] * 3

    def test_it_is_posted_again(self, database: Database) -> None:
        queue.cancel(database, order(1).digest, "a")
        queue.submit(database, order(1), A)
        assert self.states(database) == ["queued"] * 3
        queue.cancel(database, order(1).digest)  # by a key that sees everything
        queue.submit(database, order(1), B)
        assert self.states(database) == ["cancelled", "queued", "queued"]
        assert queue.cancel(database, order(1).digest, "b")
        assert self.states(database) == ["cancelled"] * 3

    def test_nobody_cancels_what_another_has(self, database: Database) -> None:
        assert not queue.cancel(database, order(1).digest, "c")
        posted = model(order(2))
        queue.submit_model(database, posted, A)
        assert not queue.cancel(database, posted.id, "b")
        assert not queue.cancel(database, order(2).digest, "b")
        assert self.states(database, posted.id) == ["queued", None, "queued"]
        assert self.states(database, order(2).digest) == ["queued", None, "queued"]

    def test_a_model_ends_without_what_another_team_wants(self, database: Database) -> None:
        mine, theirs = model(order(2), order(3), order(1), name="mine"), model(order(3), name="theirs")
        queue.submit_model(database, mine, A)
        queue.submit_model(database, theirs, B)
        queue.cancel(database, order(1).digest, "a")
        queue.cancel(database, mine.id, "a")
        found = [self.states(database, order(number).digest) for number in (1, 2, 3)]
        lives, ended = ["cancelled", "queued", "queued"], ["cancelled", None, "cancelled"]
        assert found == [lives, ended, lives]
        queue.cancel(database, theirs.id, "b")
        assert self.states(database, order(3).digest) == ["cancelled"] * 3


def test_each_team_sees_a_kernel_by_its_own_name(either_database: Database) -> None:
    """Also once it has posted the kernel as a layer, which has no name of its own."""
    queue.submit(either_database, order(1), A, "secret")
    queue.submit(either_database, order(1), B, "plain")
    queue.submit_model(either_database, model(order(1)), A)
    names = [[job.name for job in queries.list_jobs(either_database, None, None, 50, team)] for team in ("a", "b")]
    assert names == [["net", "secret"], ["plain"]]
    assert queries.find_job(either_database, order(1).digest).title in ("Kernel plain", "Kernel secret")


def test_who_cancels_what_goes_on_for_others_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "REFRESH_SECONDS", -1.0)
    with served(workers=0, asks_for_keys=True) as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:
        database = open_database()
        a, b = ({"Authorization": f"Bearer {keys.add(database, name, [f'team={name}'])}"} for name in ("a", "b"))
        database.close()
        post = "/v1/kernels?n=64&device=h200&wait=0"
        (job,) = {client.post(post, content=npy_file(), headers=who).headers["location"] for who in (a, b)}
        with client.stream("GET", f"{job}/events", headers=a) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: queued"
            assert client.delete(job, headers=a).json()["state"] == "cancelled"
            assert "event: state" in lines
        assert client.get(job, headers=a).json()["error"]["type"] == "/problems/cancelled"
        assert client.get(job, headers=b).json()["state"] == "queued"
