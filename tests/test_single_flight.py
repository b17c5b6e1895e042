"""Parts that several processes need: each is made once, whoever dies, and found by all."""

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from lospmm import store as together
from lospmm.errors import BadRequest, ToolchainFault
from lospmm.store import CLAIMS, STALE_SECONDS, Store, made_together

KEYS = [f"{at:08x}" for at in range(12)]


def make(log: Path, at: int) -> Mapping[str, bytes]:
    """Says so in a file, and takes long enough for others to come."""
    with log.open("a") as file:
        file.write(f"{at} {os.getpid()}\n")
    time.sleep(0.02)
    return {"part": f"part {at}".encode()}


def take_among_four(root: Path, log: Path) -> list[bytes]:
    """Begin once four processes have started."""
    (log.parent / f"started-{os.getpid()}").touch()
    while len(list(log.parent.glob("started-*"))) < 4:
        time.sleep(0.001)
    return take(root, log)


def take(root: Path, log: Path) -> list[bytes]:
    return [files["part"] for files in made_together(Store(root), "part", KEYS, partial(make, log))]


def test_each_part_is_made_by_one_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = pool.starmap(take_among_four, [(tmp_path / "store", log)] * 4, chunksize=1)
    assert found == [[f"part {at}".encode() for at in range(len(KEYS))]] * 4
    lines = [line.split() for line in log.read_text().splitlines()]
    assert sorted(int(at) for at, _ in lines) == list(range(len(KEYS)))
    assert len({process for _, process in lines}) > 1, "they share the work"
    assert not list((tmp_path / "store" / CLAIMS).iterdir())


def hang(root: Path, begun: Event) -> None:
    with Store(root).claimed("part", KEYS[0]):
        begun.set()
        time.sleep(60)


def test_what_a_killed_process_was_at_is_made_by_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    other = context.Process(target=hang, args=(tmp_path / "store", begun))
    other.start()
    assert begun.wait(30)
    with Store(tmp_path / "store").claimed("part", KEYS[0]) as is_ours:
        assert not is_ours
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert take(tmp_path / "store", tmp_path / "log")[0] == b"part 0"


def test_who_is_stopped_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.3)
    store = Store(tmp_path)
    with store.claimed("part", KEYS[0]), store.claimed("part", KEYS[7]):
        assert take(tmp_path, tmp_path / "log")[7] == b"part 7"


def test_what_one_fails_at_another_may_make(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(_at: int) -> Mapping[str, bytes]:
        raise ToolchainFault("no")

    with pytest.raises(ToolchainFault, match="no"):
        made_together(store, "part", KEYS, fail)
    assert len(take(tmp_path, tmp_path / "log")) == len(KEYS)


def test_what_was_made_is_found_again(tmp_path: Path) -> None:
    first = take(tmp_path / "store", tmp_path / "log")
    (tmp_path / "log").unlink()
    assert take(tmp_path / "store", tmp_path / "log") == first and not (tmp_path / "log").exists()


def test_where_there_are_no_locks_everybody_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(_file: object, _operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("lospmm.store.fcntl.flock", unlocked)
    assert len(take(tmp_path / "store", tmp_path / "log")) == len(KEYS)


def test_where_nothing_can_be_kept_everybody_makes_it(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    assert len(take(tmp_path / "store", tmp_path / "log")) == len(KEYS)


def test_a_claim_is_of_a_key(tmp_path: Path) -> None:
    claim = Store(tmp_path).claimed("part", "../../etc")
    with pytest.raises(BadRequest, match="not a key"), claim:
        pass


def test_claims_of_the_dead_are_pruned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.claimed("part", KEYS[0]), store.claimed("part", KEYS[1]):
        (old, _) = sorted((tmp_path / CLAIMS).iterdir())
        long_ago = time.time() - 2 * STALE_SECONDS
        os.utime(old, (long_ago, long_ago))
        store.prune()
        assert [path.name for path in (tmp_path / CLAIMS).iterdir()] == [f"part-{KEYS[1]}"]
