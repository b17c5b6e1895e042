"""Terms of keys: scopes, and the end of a key, which ends what it has open."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from lospmm.errors import BadRequest, BadSettings
from lospmm_server import keys
from lospmm_server.database import Database, open_database
from lospmm_server.keys import Terms
from tests.fixtures.waiting import wait_until
from tests.server.conftest import npy_file
from tests.server.served import served

POST = ("POST", "/v1/kernels?n=64&device=h200&wait=0")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(keys, "REFRESH_SECONDS", -1.0)
    database = open_database()
    database.migrate()
    yield database
    database.close()


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def client_with(key: str) -> Iterator[httpx2.Client]:
    """A client of a service that wants keys and has no workers."""
    with served(workers=0, asks_for_keys=True) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, headers=headers(key), timeout=60) as client:
            yield client


@pytest.mark.parametrize(
    "typed",
    [
        ["team="],
        ["team=a b"],
        ["teams=a"],
        ["team=" + "x" * 81],
        ["team=a", "team=b"],
        ["shared=perhaps"],
        ["scopes="],
        ["scopes=read,write"],
        ["expires=soon"],
        ["weight=0"],
        ["weight=101"],
        ["weight=1.5"],
        ["lospmm_secret"],
        ["lospmm_secret=a"],
    ],
)
def test_wrong_terms_are_refused(database: Database, tmp_path: Path, typed: list[str]) -> None:
    with pytest.raises(BadRequest) as error:
        keys.add(database, "team", typed)
    assert "secret" not in str(error.value)
    assert keys.listed(database) == []
    (tmp_path / "keys").write_text(f"team {'0' * 64} {' '.join(typed)}\n")
    with pytest.raises(BadSettings, match="line 1") as error:
        keys.read_file(tmp_path / "keys")
    assert "secret" not in str(error.value)


def test_a_key_that_would_never_be_valid_is_refused(database: Database) -> None:
    with pytest.raises(BadRequest, match="expires: the time is over"):
        keys.add(database, "team", ["expires=2020-01-01"])
    assert keys.listed(database) == []


def test_terms_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        f"old {'0' * 64}\nnew {'1' * 64}  team=a\tscopes=tune,read weight=3 expires=2030-01-31 shared # until then\n"
    )
    old, new = (keys.read_file(tmp_path / "keys")[digit * 64].terms for digit in "01")
    assert (old.team, old.shared, old.scopes, old.expires) == ("", False, {"read", "tune", "admin"}, None)
    assert (new.team, new.shared, new.scopes, new.weight) == ("a", True, {"read", "tune"}, 3)
    assert new.expires == datetime(2030, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("scopes", "status"),
    [
        ("read", {"read": 200, "tune": 403, "admin": 403}),
        ("tune", {"read": 403, "tune": 202, "admin": 403}),
        ("admin", {"read": 403, "tune": 403, "admin": 200}),
        ("read,tune", {"read": 200, "tune": 202, "admin": 403}),
        (None, {"read": 200, "tune": 202, "admin": 200}),
    ],
)
def test_scopes(database: Database, scopes: str | None, status: dict[str, int]) -> None:
    key = keys.add(database, "team", [f"scopes={scopes}"] if scopes else [])
    asked = {
        "read": [("GET", "/v1/jobs"), ("HEAD", "/v1/jobs"), ("GET", "/")],
        "tune": [POST],
        "admin": [("GET", "/metrics")],
    }
    with client_with(key) as client:
        for scope, requests in asked.items():
            for method, path in requests:
                content = npy_file() if method == "POST" else b""
                answer = client.request(method, path, content=content)
                assert answer.status_code == status[scope], (method, path)
        if status["tune"] == 403:
            for method, path in (("DELETE", f"/v1/jobs/{'0' * 64}"), ("POST", "/v1/models"), ("POST", "/jobs")):
                answer = client.request(method, path)
                assert (answer.status_code, "lacks the scope 'tune'" in answer.text) == (403, True)


@pytest.mark.usefixtures("database")
class TestEnds:
    """A key that is no longer valid ends streams and waiting requests, though nothing happens to their job."""

    @pytest.fixture
    def file(self, tmp_path: Path, set_environment: Callable[[str, object], None]) -> Path:
        file = tmp_path / "keys"
        set_environment("LOSPMM_API_KEYS", file)
        return file

    def listens(self, key: str, end: Callable[[], object]) -> None:
        """Post a job that nobody does, follow it in two ways, and see both end with the key."""
        answers: dict[str, httpx2.Response] = {}
        with client_with(key) as client:
            job = client.post(POST[1], content=npy_file()).headers["location"]
            waiting = threading.Thread(target=lambda: answers.update(wait=client.get(f"{job}?wait=50")))
            waiting.start()
            with client.stream("GET", f"{job}/events") as stream:
                lines = stream.iter_lines()
                assert next(lines) == "event: queued"
                end()
                assert "event: state" not in list(lines)
            waiting.join(60)
            assert answers["wait"].status_code == client.get(job).status_code == 401

    def test_one_that_is_revoked(self, database: Database) -> None:
        self.listens(keys.add(database, "team"), lambda: keys.revoke(database, "team"))

    @pytest.mark.parametrize("line", ["", f"team {keys.digest_of('one')} expires=2020-01-01"])
    def test_one_of_the_file(self, file: Path, line: str) -> None:
        other = f"other {keys.digest_of('two')}\n"
        file.write_text(f"team {keys.digest_of('one')}\n{other}")
        self.listens("one", lambda: file.write_text(f"{line}\n{other}"))

    def test_one_whose_time_comes(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        key = keys.add(database, "team", ["expires=2900-01-01"])
        later = datetime(2900, 1, 1, tzinfo=UTC) + timedelta(seconds=1)
        self.listens(key, lambda: monkeypatch.setattr(keys, "_now", lambda: later))
        assert [found.is_valid for found in keys.listed(database)] == [False]

    def test_others_go_on(self, file: Path) -> None:
        file.write_text(f"team {keys.digest_of('one')}\nother {keys.digest_of('two')}\n")
        with client_with("two") as client:
            job = client.post(POST[1], content=npy_file()).headers["location"]
            with client.stream("GET", f"{job}/events") as stream:
                lines = stream.iter_lines()
                assert next(lines) == "event: queued"
                file.write_text(f"other {keys.digest_of('two')}\n")
                wait_until(lambda: client.get(job, headers=headers("one")).status_code == 401)
                client.delete(job)
                assert {"event: cancelled", "event: state"} <= set(lines)


def test_terms_are_what_a_caller_has(database: Database) -> None:
    """A key on other terms is not the one that was let in."""
    ring = keys.Keyring(database)
    key = keys.add(database, "team", ["team=a"])
    ring.refresh()
    caller = ring.caller_of(key)
    assert caller is not None
    assert (caller.team, caller.sees, ring.knows(caller)) == ("a", "a", True)
    assert not ring.knows(keys.Caller(caller.name, caller.sha256, Terms.read(["team=b"])))
