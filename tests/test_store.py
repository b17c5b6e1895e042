"""The store: what is put comes back whole or not at all, whatever happens to the disk or to the writer."""

import errno
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm import store as store_module
from lospmm.errors import BadRequest, ToolchainFault
from lospmm.store import SCRATCH, STALE_SECONDS, Store

KEY = "ab" * 32
OTHER = "cd" * 32
FILES = {"kernel.cubin": b"\x7fELF" * 10, "manifest.json": b"{}"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def leftovers(store: Store) -> list[Path]:
    return list((store.root / SCRATCH).glob("*"))


names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(lambda name: name != "entry.json")


@given(key=st.from_regex(r"[0-9a-f]{8,64}", fullmatch=True), files=st.dictionaries(names, st.binary(), max_size=4))
def test_what_is_put_comes_back(tmp_path_factory: pytest.TempPathFactory, key: str, files: dict[str, bytes]) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    store.put("unit", key, files)
    assert store.get("unit", key) == files
    assert [(entry.kind, entry.key) for entry in store.entries()] == [("unit", key)]
    assert store.verify() == []


def test_an_absent_entry_is_none(store: Store) -> None:
    assert store.get("kernel", KEY) is None
    assert list(store.entries()) == []


def test_kinds_are_apart(store: Store) -> None:
    store.put("unit", KEY, FILES)
    assert store.get("kernel", KEY) is None


@pytest.mark.parametrize("key", ["", "abc", "../../../etc/passwd", "AB" * 32, KEY + "\n", "g" * 64, "a" * 129])
def test_a_key_is_hexadecimal(store: Store, key: str) -> None:
    for use in (lambda: store.get("unit", key), lambda: store.put("unit", key, {})):
        with pytest.raises(BadRequest, match="not a key"):
            use()


@pytest.mark.parametrize("name", ["../x", "entry.json", "", "a/b", ".hidden"])
def test_a_file_stays_in_its_entry(store: Store, name: str) -> None:
    with pytest.raises(BadRequest, match="name of a file"):
        store.put("unit", KEY, {name: b""})


def test_a_kind_is_a_word(store: Store) -> None:
    with pytest.raises(BadRequest, match="not a kind"):
        store.get("..", KEY)


def test_the_first_writer_wins(store: Store) -> None:
    assert store.put("unit", KEY, {"file": b"first"})
    assert not store.put("unit", KEY, {"file": b"second"})
    assert store.get("unit", KEY) == {"file": b"first"}


def test_a_replaced_entry_is_the_last_one_whole(store: Store) -> None:
    for files in (FILES, {"another.bin": b"1"}):
        store.replace("kernel", KEY, files)
        assert store.get("kernel", KEY) == files
    assert store.verify() == [] and leftovers(store) == []


def test_equal_files_of_an_entry_are_linked(store: Store) -> None:
    other = KEY[::-1]
    store.put("unit", KEY, {"a": b"same", "b": b"one"})
    store.put("unit", other, {"a": b"same", "b": b"two"}, like=KEY)
    folders = [store.directory("unit", key) for key in (KEY, other)]
    assert [len({(one / name).stat().st_ino for one in folders}) for name in "ab"] == [1, 2]
    store.put("unit", KEY[:-1] + "0", {"a": b"same"}, like="f" * 64)
    assert store.verify() == [] and store.get("unit", other) == {"a": b"same", "b": b"two"}


def test_staged_entries_are_taken_or_leave_nothing(store: Store) -> None:
    store.put("unit", KEY, {"a": b"first"})
    other = KEY[::-1]
    with store.staging() as staged:
        for key in (KEY, other):
            staged.put("unit", key, {"a": b"second"})
        assert [entry.key for entry in store.entries()] == [KEY]
    assert [entry.key for entry in store.entries()] == [KEY]
    with store.staging() as staged:
        for key in (KEY, other):
            staged.put("unit", key, {"a": b"second"})
        store.adopt(staged)
    assert (store.get("unit", KEY), store.get("unit", other)) == ({"a": b"first"}, {"a": b"second"})
    assert list((store.root / SCRATCH).iterdir()) == []


def test_writers_of_one_key_do_no_harm(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them find nothing there, write at once, and one rename wins."""
    monkeypatch.setattr(store_module, "_sync", lambda _: time.sleep(0.01))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.put("unit", KEY, FILES), range(8)))
    assert store.get("unit", KEY) == FILES
    assert leftovers(store) == []


def flip(directory: Path) -> None:
    path = directory / "kernel.cubin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def redirect(directory: Path) -> None:
    manifest = directory / "entry.json"
    manifest.write_text(manifest.read_text().replace("kernel.cubin", "../entry"))


DAMAGES = {
    "a flipped bit": flip,
    "a truncated file": lambda directory: os.truncate(directory / "kernel.cubin", 5),
    "a missing file": lambda directory: (directory / "manifest.json").unlink(),
    "a missing manifest": lambda directory: (directory / "entry.json").unlink(),
    "an empty manifest": lambda directory: (directory / "entry.json").write_bytes(b""),
    "another manifest": lambda directory: (directory / "entry.json").write_text('["files"]'),
    "a name that leads outside": redirect,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_entry_is_reported_removed_and_built_again(store: Store, damage: str) -> None:
    store.put("kernel", KEY, FILES)
    store.put("kernel", OTHER, FILES)
    DAMAGES[damage](store.directory("kernel", KEY))
    assert [entry.key for entry in store.verify()] == [KEY]
    assert store.get("kernel", KEY) is None
    assert not store.directory("kernel", KEY).exists()
    store.put("kernel", KEY, FILES)
    assert store.get("kernel", KEY) == FILES
    assert store.verify() == []
    assert leftovers(store) == []


@pytest.mark.parametrize("writes", range(6))
def test_a_full_disk_is_a_fault_that_names_the_directory(
    store: Store, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The disk fills up after any number of writes: the entry is whole or absent, and nothing else is left."""
    done = 0
    sync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal done
        done += 1
        if done > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        if writes < 5:  # two files, the manifest, and two directories
            with pytest.raises(ToolchainFault, match=f"{store.root}.*No space left"):
                store.put("unit", KEY, FILES)
        else:
            store.put("unit", KEY, FILES)
    assert store.get("unit", KEY) == (FILES if writes >= 4 else None)
    assert leftovers(store) == []


def test_a_root_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ToolchainFault, match=str(tmp_path / "file")):
        Store(tmp_path / "file").put("unit", KEY, FILES)


def used_at(store: Store, key: str, seconds_ago: float) -> None:
    moment = time.time() - seconds_ago
    os.utime(store.directory("unit", key), (moment, moment))


def test_prune_removes_the_least_recently_used(store: Store) -> None:
    keys = [f"{index:08x}" for index in range(4)]
    for index, key in enumerate(keys):
        store.put("unit", key, {"file": bytes(1000)})
        used_at(store, key, 100 - index)
    assert store.get("unit", keys[0]) is not None  # now the most recent
    sizes = {entry.key: entry.size_bytes for entry in store.entries()}
    removed = store.prune(max_bytes=sizes[keys[0]] + sizes[keys[3]])
    assert [entry.key for entry in removed] == [keys[1], keys[2]]
    assert {entry.key for entry in store.entries()} == {keys[0], keys[3]}
    assert store.prune(max_bytes=10**9) == []
    store.prune(max_bytes=0)
    assert list(store.entries()) == []


def test_prune_removes_what_is_old(store: Store) -> None:
    for key, age in ((KEY, 1000.0), (OTHER, 10.0)):
        store.put("unit", key, FILES)
        used_at(store, key, age)
    assert [entry.key for entry in store.prune(older_than_seconds=100)] == [KEY]
    assert store.get("unit", OTHER) == FILES


def test_prune_clears_what_dead_writers_left(store: Store) -> None:
    dead, alive = store.root / SCRATCH / "dead", store.root / SCRATCH / "alive"
    for directory in (dead, alive):
        directory.mkdir(parents=True)
        (directory / "half").write_bytes(b"half")
    moment = time.time() - STALE_SECONDS - 1
    os.utime(dead, (moment, moment))
    store.prune()
    assert leftovers(store) == [alive]


def test_a_store_that_may_only_be_read_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("unit", KEY, FILES)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.get("unit", KEY) == FILES


def test_an_entry_that_was_copied_to_another_key_is_not_served(store: Store) -> None:
    one, other = "a" * 64, "b" * 64
    store.put("unit", one, {"x": b"1"})
    target = store.directory("unit", other)
    target.parent.mkdir(parents=True)
    shutil.copytree(store.directory("unit", one), target)
    assert [entry.key for entry in store.verify()] == [other]
    assert store.get("unit", other) is None and not target.exists()
    assert store.get("unit", one) == {"x": b"1"}


def test_a_store_that_cannot_be_looked_at_is_a_fault(tmp_path: Path) -> None:
    """It is not an empty one; a root that is not there is."""
    (tmp_path / "file").touch()
    for look in (lambda: list(Store(tmp_path / "file").entries()), Store(tmp_path / "file").verify):
        with pytest.raises(ToolchainFault, match=f"the store in {tmp_path}/file cannot be used: Not a directory"):
            look()
    assert Store(tmp_path / "nowhere").verify() == []


def test_what_is_no_entry_is_a_corrupt_one(store: Store) -> None:
    """A file in the place of an entry, or a folder in the place of a file, keeps nobody from the others."""
    for key in (KEY, OTHER):
        store.put("unit", key, FILES)
    (store.directory("unit", KEY) / "kernel.cubin").unlink()
    (store.directory("unit", KEY) / "kernel.cubin").mkdir()
    stray = store.directory("unit", "ef" * 32)
    stray.parent.mkdir()
    stray.touch()
    assert {entry.key for entry in store.verify()} == {KEY, "ef" * 32}
    assert store.get("unit", KEY) is None and not store.directory("unit", KEY).exists()
    assert store.get("unit", OTHER) == FILES
    assert [entry.key for entry in store.prune(older_than_seconds=3600)] == ["ef" * 32]
    assert [entry.key for entry in store.entries()] == [OTHER]


def test_a_damaged_entry_that_cannot_be_removed_is_absent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("unit", KEY, FILES)
    (store.directory("unit", KEY) / "kernel.cubin").write_bytes(b"")

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "rename", refused)
    assert store.get("unit", KEY) is None
    store.put("unit", KEY, FILES)
    assert [entry.key for entry in store.verify()] == [KEY]
    assert store.prune(max_bytes=0) == []


def test_an_entry_that_is_removed_while_it_is_read_is_not_corrupt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one removed that another writer has put in its place."""
    read_bytes = Path.read_bytes
    meanwhile: list[dict[str, bytes]] = []

    def replaced(path: Path) -> bytes:
        if meanwhile:
            shutil.rmtree(store.directory("unit", KEY))
            if new := meanwhile.pop():
                store.put("unit", KEY, new)
                (store.directory("unit", KEY) / path.name).rename(path.with_name("aside"))
                try:
                    return read_bytes(path)
                finally:
                    path.with_name("aside").rename(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced)
    for new, found in (({}, None), (FILES, FILES)):
        store.put("unit", KEY, FILES)
        meanwhile.append(new)
        assert store.verify() == []
        store.put("unit", KEY, FILES)
        meanwhile.append(new)
        assert store.get("unit", KEY) == found
    assert store.get("unit", KEY) == FILES
