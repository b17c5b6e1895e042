"""API keys: where other machines can reach the service, nobody gets in without one."""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from lospmm.artifact import kept
from lospmm.cli import main as cli
from lospmm.errors import BadRequest, BadSettings
from lospmm_server import access, guesses, keys
from lospmm_server.app import OPEN_PATHS
from lospmm_server.database import Database, open_database
from lospmm_server.faults import DatabaseFault, TooManyGuesses
from lospmm_server.keys import Keyring
from lospmm_server.service import Service
from tests.cli.command import Answer, Command
from tests.server.conftest import client_of, npy_file
from tests.server.processes import SERVE, serving
from tests.server.served import served

ROUTES = (
    ("POST", "/v1/kernels?n=64&device=h200"),
    ("POST", "/v1/models?n=64&device=h200"),
    ("GET", f"/v1/kernels/{'0' * 64}"),
    ("GET", f"/v1/kernels/{'0' * 64}/cubin"),
    ("GET", "/v1/jobs"),
    ("GET", f"/v1/jobs/{'0' * 64}"),
    ("GET", f"/v1/jobs/{'0' * 64}/events"),
    ("DELETE", f"/v1/jobs/{'0' * 64}"),
    ("GET", "/metrics"),
    ("GET", "/"),
)


@pytest.fixture
def database() -> Iterator[Database]:
    database = open_database()
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def guarded(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A service that wants a key, and looks for new ones at each request."""
    monkeypatch.setattr(keys, "REFRESH_SECONDS", -1.0)
    service = Service(database, kept.open_store(), keyring=Keyring(database))
    with client_of(service) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_nothing_without_a_key(guarded: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "ALLOWED", 1000)
    key = keys.add(database, "team")
    wrong = (
        {},
        bearer(""),
        bearer(key[:-1]),
        bearer(f"{key}x"),
        bearer(keys.digest_of(key)),
        {"Authorization": key},
        {"Authorization": "Basic ?"},
        {"Authorization": "Basic " + base64.b64encode(b"team:no").decode()},
        {"Authorization": f"Digest {key}"},
    )
    for method, path in ROUTES:
        for headers in wrong:
            answer = guarded.request(method, path, headers=headers)
            assert answer.status_code == 401, (method, path, headers)
            assert answer.json()["type"] == "/problems/unauthorized"
            assert answer.headers["www-authenticate"].startswith("Bearer")
    for path in (
        "/healthz",
        "/readyz",
        "/openapi.json",
        "/docs",
        *re.findall(r'"(/static/.*?)"', guarded.get("/docs").text),
    ):
        assert guarded.get(path).status_code == 200


class TestWrongKeys:
    def test_they_are_slowed_down_and_a_valid_key_is_not(self, guarded: TestClient, database: Database) -> None:
        key = keys.add(database, "team")
        statuses = [guarded.get("/v1/jobs", headers=bearer("no")).status_code for _ in range(guesses.ALLOWED + 2)]
        assert statuses == [401] * guesses.ALLOWED + [429] * 2
        answer = guarded.get("/v1/jobs", headers=bearer("no"))
        assert answer.json()["type"] == "/problems/too-many-guesses"
        assert 1 <= int(answer.headers["retry-after"]) <= guesses.PERIOD_SECONDS + 1
        assert guarded.get("/v1/jobs").status_code == 401
        assert guarded.get("/v1/jobs", headers=bearer(key)).status_code == 200

    def test_a_line_a_second(
        self, guarded: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests = []
        monkeypatch.setattr(access._log, "info", lambda _event, **fields: requests.append(fields["status"]))
        now = 1000.0
        monkeypatch.setattr(guesses.time, "monotonic", lambda: now)
        for _ in range(50):
            guarded.get("/v1/jobs", headers=bearer("no"))
        now += guesses.TELL_SECONDS
        guarded.get("/v1/jobs", headers=bearer("no"))
        guarded.get("/v1/jobs")
        lines = [record.message for record in caplog.records if record.name == guesses.__name__]
        assert [line.split(" requests")[0] for line in lines] == ["1", "50"]
        assert lines[0].endswith("with wrong API keys, the last from testclient")
        assert requests == [401]  # that without a key

    def test_the_minute_passes_and_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 0.0
        monkeypatch.setattr(guesses.time, "monotonic", lambda: now)
        tried = guesses.Guesses()
        for host in range(guesses.ALLOWED):  # of one network
            tried.add(f"2001:db8::{host:x}")
        tried.add("2001:db8:1::1")
        tried.add("::ffff:192.0.2.1")
        with pytest.raises(TooManyGuesses):
            tried.add("2001:db8::ffff")
        now += guesses.PERIOD_SECONDS + 1
        tried.add("2001:db8::ffff")
        for host in range(2 * guesses.ADDRESSES):
            tried.add(f"10.0.{host >> 8}.{host & 255}")
        assert len(tried._counts) == guesses.ADDRESSES


def test_the_openapi_says_how_keys_are_sent(guarded: TestClient, shared: TestClient) -> None:
    found = guarded.get("/openapi.json").json()
    schemes = found["components"]["securitySchemes"]
    assert {name: (scheme["type"], scheme["scheme"]) for name, scheme in schemes.items()} == {
        name: ("http", name) for name in ("bearer", "basic")
    }
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert ({} in operation["security"]) == (path in OPEN_PATHS), path
            assert all({name: []} in operation["security"] for name in schemes)
    assert "securitySchemes" not in shared.get("/openapi.json").json()["components"]  # nobody is asked for one


def test_a_key_opens_until_it_is_revoked(guarded: TestClient, database: Database) -> None:
    key = keys.add(database, "team")
    basic = {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}
    for headers in (bearer(key), basic):
        assert guarded.get("/v1/jobs", headers=headers).status_code == 200
    accepted = guarded.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file(), headers=bearer(key))
    assert accepted.status_code == 202
    assert guarded.get("/v1/jobs", headers={**bearer(key), "Host": "service.example"}).status_code == 200
    for foreign in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example", "Host": "service.example"}):
        answer = guarded.post("/v1/kernels?n=64&device=h200&wait=0", content=npy_file(2), headers={**basic, **foreign})
        assert answer.status_code == 403
    keys.revoke(database, "team")
    assert guarded.get("/v1/jobs", headers=bearer(key)).status_code == 401
    assert [(found.name, found.is_valid) for found in keys.listed(database)] == [("team", False)]


def test_only_hashes_are_kept(database: Database, tmp_path: Path) -> None:
    key = keys.add(database, "team")
    database.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "cache").glob("service.db*"))
    assert keys.digest_of(key).encode() in content
    assert key.encode() not in content
    assert key.removeprefix(keys.PREFIX).encode() not in content


@pytest.mark.parametrize("name", ["", "a b", "x" * 81, "é", "a\n"])
def test_names_that_there_cannot_be(database: Database, name: str) -> None:
    with pytest.raises(BadRequest, match="key name"):
        keys.add(database, name)


def test_a_name_is_taken_once_at_a_time(database: Database) -> None:
    keys.add(database, "team")
    with pytest.raises(BadRequest, match="there is a key 'team' already"):
        keys.add(database, "team")
    keys.revoke(database, "team")
    keys.add(database, "team")
    with pytest.raises(BadRequest, match="no valid key 'other'"):
        keys.revoke(database, "other")


class TestFile:
    def test_its_keys_open_too(
        self, guarded: TestClient, tmp_path: Path, set_environment: Callable[[str, object], None]
    ) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# who may ask\n\nteam {keys.digest_of('one')}\nother\t{keys.digest_of('two')}  # them\n")
        set_environment("LOSPMM_API_KEYS", file)
        for key in ("one", "two"):
            assert guarded.get("/v1/jobs", headers=bearer(key)).status_code == 200
        file.write_text(f"other {keys.digest_of('two')}\n")
        assert guarded.get("/v1/jobs", headers=bearer("one")).status_code == 401

    def test_keys_of_one_name_are_all_valid(
        self, database: Database, tmp_path: Path, set_environment: Callable[[str, object], None]
    ) -> None:
        (tmp_path / "keys").write_text(f"team {keys.digest_of('one')}\nteam {keys.digest_of('two')}\n")
        set_environment("LOSPMM_API_KEYS", tmp_path / "keys")
        added, keyring = keys.add(database, "team"), Keyring(database)
        keyring.refresh()
        found = [keyring.caller_of(key) for key in ("one", "two", added, "three")]
        assert [caller and caller.name for caller in found] == ["team", "team", "team", None]

    @pytest.mark.parametrize("line", ["team", "team secret", f"team {'A' * 64}", f"te am {'0' * 64}"])
    def test_a_wrong_line_is_named(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "keys").write_text(f"ok {'0' * 64}\n{line}\n")
        with pytest.raises(BadSettings, match=r"LOSPMM_API_KEYS: .*keys, line 2") as error:
            keys.read_file(tmp_path / "keys")
        assert "secret" not in str(error.value)

    def test_a_file_that_there_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(BadSettings, match=r"LOSPMM_API_KEYS: .* cannot be read: No such file"):
            keys.read_file(tmp_path / "none")


def test_known_keys_outlast_the_database(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    key, keyring = keys.add(database, "team"), Keyring(database)

    def gone(_self: Database) -> None:
        raise DatabaseFault("gone")

    with monkeypatch.context() as patched:
        patched.setattr(Database, "read", gone)
        with pytest.raises(DatabaseFault):
            keyring.refresh()
    assert keyring.refresh()
    monkeypatch.setattr(Database, "read", gone)
    assert keyring.refresh()
    assert keyring.caller_of(key).name == "team"


@pytest.fixture
def lospmm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command in this process."""
    monkeypatch.setenv("LOSPMM_MAX_NONZEROS", "1000")  # else ``serve`` would set it, for all tests after this one

    def run(*arguments: object) -> Answer:
        return Answer(cli.run([f"{argument}" for argument in arguments]), *capsys.readouterr())

    return run


@pytest.mark.slow
def test_an_address_that_others_can_reach_asks_for_keys(tmp_path: Path, database: Database) -> None:
    key = keys.add(database, "team")
    with serving(tmp_path, (*SERVE, "--host", "0.0.0.0", "--workers", "0")) as (_, port):
        url = f"http://127.0.0.1:{port}/v1/jobs"
        assert httpx2.get(url).status_code == 401
        assert httpx2.get(url, headers=bearer(key)).status_code == 200


def test_the_commands(lospmm: Command) -> None:
    key = lospmm("keys", "add", "team").out.strip()
    assert lospmm("keys", "add", "other", "team=a", "weight=2").status == 0
    assert lospmm("keys", "add", "wrong", "teams=a").status == 2
    assert lospmm("keys", "ls").out.splitlines()[1].endswith("  valid  team=a weight=2")
    assert key.startswith(keys.PREFIX)
    assert "team" in lospmm("keys", "ls").out
    assert key not in lospmm("keys", "ls", "--json").out
    with served(workers=0, asks_for_keys=True) as port:
        url = f"http://127.0.0.1:{port}/v1/jobs"
        assert httpx2.get(url).status_code == 401
        assert httpx2.get(url, headers=bearer(key)).status_code == 200
    assert lospmm("keys", "revoke", "team").status == 0
    assert lospmm("keys", "revoke", "other").status == 0
    refused = lospmm("serve", "--host", "0.0.0.0", "--port", "0")
    assert (refused.status, "there is no API key" in refused.err) == (2, True)


def test_a_wrong_file_is_refused_where_nobody_is_asked_for_a_key(
    lospmm: Command, tmp_path: Path, set_environment: Callable[[str, object], None]
) -> None:
    (tmp_path / "keys").write_text("garbage\n")
    set_environment("LOSPMM_API_KEYS", tmp_path / "keys")
    ended = lospmm("serve", "--port", "0", "--workers", "0")
    assert ended.status == 2
    assert "LOSPMM_API_KEYS: " in ended.err and "line 1: a name and the sha256 of its key" in ended.err
