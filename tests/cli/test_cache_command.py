"""lospmm cache: listed, checked and pruned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lospmm.store import Store
from tests.cli.command import H200, Command


def test_the_store_is_listed_checked_and_pruned(
    lospmm_command: Command, own_cache: Store, tmp_path: Path, matrix: Path
) -> None:
    def entries(command: str, *options: object, status: int = 0) -> list[dict[str, Any]]:
        answer = lospmm_command("cache", command, "--json", *options)
        assert (answer.status, answer.err) == (status, "")
        listed: list[dict[str, Any]] = json.loads(answer.out)["entries"]
        return listed

    assert entries("ls") == []
    tune = ("tune", matrix, "--n", 50, *H200, "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*tune).status == 0
    made = entries("ls")
    assert {entry["kind"] for entry in made} == {"kernel", "unit"}
    assert "kernel" in lospmm_command("cache", "ls").out
    assert lospmm_command("cache", "verify").out == "corrupt: 0 entries, 0 bytes\n"

    (kernel,) = (entry["key"] for entry in made if entry["kind"] == "kernel")
    (own_cache.directory("kernel", kernel) / "kernel.cubin").write_bytes(b"damaged")
    assert [entry["key"] for entry in entries("verify", status=4)] == [kernel]
    assert lospmm_command("cache", "verify").status == 4
    assert lospmm_command(*tune).status == 0
    assert entries("verify") == []

    assert entries("prune", "--max-mb", 1000, "--older-than-days", 1) == []
    assert len(entries("prune", "--max-mb", 0)) == len(made)
    assert entries("ls") == []


def test_a_store_in_disorder_is_reported(lospmm_command: Command, own_cache: Store) -> None:
    path = own_cache.directory("unit", "ab" * 32)
    path.parent.mkdir(parents=True)
    path.write_text("a file where a folder should be")
    assert "ab" * 32 in lospmm_command("cache", "ls").out
    answer = lospmm_command("cache", "verify")
    assert (answer.status, "ab" * 32 in answer.out) == (4, True)
    assert lospmm_command("cache", "prune", "--older-than-days", 1).status == 0
    assert not path.exists()


def test_a_store_that_is_none_is_not_an_empty_one(
    lospmm_command: Command, tmp_path: Path, set_environment: Callable[[str, object], None]
) -> None:
    (tmp_path / "file").touch()
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "file")
    for what in ("ls", "verify", "prune"):
        answer = lospmm_command("cache", what)
        assert (answer.status, answer.out) == (4, ""), what
        assert "file cannot be used: Not a directory" in answer.error
