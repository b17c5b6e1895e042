"""Kernels in memory: sent at once, checked on the disk every few seconds, and never too many."""

import shutil

import pytest
from starlette.testclient import TestClient

from lospmm.artifact import kept
from lospmm.store import Store
from lospmm_server import shelf
from lospmm_server.service import Service
from lospmm_server.shelf import Shelf
from tests.server.conftest import npy_file

POST = "/v1/kernels?n=16&device=h200&wait=60"


@pytest.fixture
def digest(client: TestClient) -> str:
    return client.post(POST, content=npy_file()).json()["digest"]


def test_it_reads_the_disk_once_in_a_while(service: Service, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, reads = Shelf(service.store), []
    find = kept.find
    monkeypatch.setattr(kept, "find", lambda *asked: reads.append(1) or find(*asked))
    assert held.at_hand(digest) is None
    assert held.find(digest) is not None
    for _ in range(100):
        assert held.at_hand(digest) is not None
    assert len(reads) == 1
    monkeypatch.setattr(shelf, "CHECK_SECONDS", -1.0)
    assert held.at_hand(digest) is None  # one is sent to look


def test_one_looks_and_the_others_are_served(service: Service, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, now = Shelf(service.store), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    held.find(digest)
    now[0] += shelf.CHECK_SECONDS + 1
    assert held.at_hand(digest) is None
    assert held.at_hand(digest) is not None
    assert held.find(digest) is not None


def test_what_is_gone_from_the_disk_is_gone(service: Service, digest: str) -> None:
    held = Shelf(service.store)
    assert held.find(digest) is not None
    shutil.rmtree(Store(service.store.root).directory(kept.KERNELS, digest))
    assert held.find(digest) is None
    assert held.at_hand(digest) is None


def test_the_longest_unused_makes_room(
    client: TestClient, service: Service, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [client.post(POST, content=npy_file(seed)).json()["digest"] for seed in (1, 2)]
    held = Shelf(service.store)
    first = held.find(digest)
    assert first is not None
    monkeypatch.setattr(shelf, "SHELF_BYTES", int(2.5 * first.size))
    held.find(others[0])
    assert held.at_hand(digest) is not None
    held.find(others[1])
    assert [held.at_hand(one) is not None for one in (digest, *others)] == [True, False, True]
    monkeypatch.setattr(shelf, "SHELF_BYTES", 10)
    assert held.find(digest) is not None  # sent, but not held
    assert held.at_hand(digest) is None
