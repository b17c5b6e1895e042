"""A variable that looks like a setting and is none: one line on stderr, and no error."""

import json
import os
import sys
from collections.abc import Callable

import pytest

from lospmm.settings import Settings, unknown_variables
from tests.cli.command import Command, process


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LOSPMM_CACHEDIR", "did you mean LOSPMM_CACHE_DIR?"),
        ("LOSPMM_MAX_NONZERO", "did you mean LOSPMM_MAX_NONZEROS?"),
        ("LOSPMM_API_KEY", "did you mean LOSPMM_API_KEYS?"),
        ("lospmm_wokers", "did you mean LOSPMM_WORKERS?"),
        ("LOSPMM_COLOUR", "docs/settings.md lists the settings"),
        ("LOSPMM_", "docs/settings.md lists the settings"),
        ("LOSPMM_PORT", "docs/settings.md lists the settings"),
        ("LOSPMM_GUARDS", "docs/settings.md lists the settings"),
        ("LOSPMM_\x1b[2J", "docs/settings.md lists the settings"),
    ],
)
def test_what_is_no_setting(name: str, hint: str) -> None:
    (line,) = unknown_variables({name: "8000"})
    assert line == f"{name.replace(chr(27), chr(92) + 'x1b')}: no such setting; {hint}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"LOSPMM_{name.upper()}", "1") for name in Settings.model_fields),
        ("lospmm_cache_dir", "/cache"),  # which is read
        ("LOSPMM_CACHEDIR", ""),
        ("LOSPMM_GUARD", "a token"),
        ("LOSPMM_COMMIT", "0123abcd"),
        ("LOSPMM_TEST_SCREENSHOTS", "build"),
        ("CUDA_HOME", "/usr/local/cuda"),
        # Kubernetes, of the services "lospmm" and "lospmm-server"
        ("LOSPMM_SERVICE_HOST", "10.0.0.11"),
        ("LOSPMM_SERVICE_PORT", "8000"),
        ("LOSPMM_SERVER_SERVICE_PORT_HTTP", "8000"),
        ("LOSPMM_PORT", "tcp://10.0.0.11:8000"),
        ("LOSPMM_SERVER_PORT", "tcp://10.0.0.11:8000"),
        ("LOSPMM_PORT_8000_TCP", "tcp://10.0.0.11:8000"),
        ("LOSPMM_SERVER_PORT_8000_TCP_ADDR", "10.0.0.11"),
    ],
)
def test_what_is_left_alone(name: str, value: str) -> None:
    assert unknown_variables({name: value}) == []


@pytest.mark.usefixtures("own_cache")
def test_a_command_says_so_once_and_goes_on(
    lospmm_command: Command, set_environment: Callable[[str, object], None]
) -> None:
    set_environment("LOSPMM_CACHEDIR", "/elsewhere")
    set_environment("LOSPMM_XYZ", 1)
    answer = lospmm_command("cache", "ls", "--json")
    assert (answer.status, json.loads(answer.out)) == (0, {"entries": []})
    assert answer.err.splitlines() == [
        "note: LOSPMM_CACHEDIR: no such setting; did you mean LOSPMM_CACHE_DIR?",
        "note: LOSPMM_XYZ: no such setting; docs/settings.md lists the settings",
    ]


def test_a_refused_command_has_said_so_before(lospmm_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The misspelt setting may be why it is refused."""
    monkeypatch.setenv("LOSPMM_API_KEY", "keys.txt")
    answer = lospmm_command("serve", "--host", "0.0.0.0", "--port", 70000)
    assert answer.status == 2
    note, error = answer.err.splitlines()
    assert note.endswith("did you mean LOSPMM_API_KEYS?")
    assert error.startswith("error: port 70000")


@pytest.mark.slow
@pytest.mark.parametrize("parent", [(), ("--parent", str(os.getpid()))])
def test_a_worker_says_so_in_its_log_unless_its_server_has(parent: tuple[str, ...]) -> None:
    environment = {**os.environ, "LOSPMM_CACHEDIR": "/cache", "LOSPMM_DATABASE_URL": "postgresql://localhost:1/none"}
    answer = process("worker", *parent, env=environment)
    assert answer.status == 4
    *log, error = answer.err.splitlines()
    assert error.startswith("error: ")
    said = [entry["event"] for entry in map(json.loads, log) if "no such setting" in entry["event"]]
    assert said == ([] if parent else ["LOSPMM_CACHEDIR: no such setting; did you mean LOSPMM_CACHE_DIR?"])


def test_the_library_says_nothing() -> None:
    program = "import lospmm; from lospmm.settings import settings; settings()"
    answer = process(env={**os.environ, "LOSPMM_CACHEDIR": "/cache"}, command=(sys.executable, "-c", program))
    assert (answer.status, answer.out, answer.err) == (0, "", "")
