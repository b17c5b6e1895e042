"""Kernels that need not be built when they are asked for: the fastest are kept, and no file is left."""

from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.problem.problem import Launch
from lospmm.toolchain.compile import Built, Compiled, OnDisk
from lospmm.tuning.builders import BuildPlace, PrefetchedBuilds

LAUNCH = Launch((1, 1, 1), 32)


def on_disk(folder: Path, name: str) -> OnDisk:
    path = folder / f"{name}.cubin"
    path.write_bytes(name.encode())
    return OnDisk(path, name, LAUNCH)


def content(built: Built | None) -> bytes | None:
    if built is None:
        return None
    return built.cubin if isinstance(built.cubin, bytes) else built.cubin.read_bytes()


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(1, 1e6)), max_size=30, unique_by=lambda one: one[0]))
def test_the_fastest_are_kept(timed: list[tuple[int, float]]) -> None:
    with PrefetchedBuilds(kept=4) as stock:
        for name, micros in timed:
            stock.keep(name, Compiled(b"%d" % name, "k", LAUNCH), micros)
            if stock.kept(name) is not None:
                stock.keep(name, Compiled(b"another", "k", LAUNCH), micros / 2)  # the first one stays
        fastest = sorted(timed, key=lambda one: one[1])[:4]
        limit = fastest[-1][1] if fastest else 0
        for name, micros in timed:
            if micros < limit or len(timed) <= 4:
                assert content(stock.kept(name)) == b"%d" % name
            elif micros > limit:
                assert stock.kept(name) is stock.take(name) is None


def test_candidates_and_plans_have_places_of_their_own() -> None:
    """One kind's fastest do not push out the other's, each of which is timed again."""
    with PrefetchedBuilds(kept=2) as stock:
        for name in ("a", "b", "c"):
            stock.keep(name, Compiled(name.encode(), "k", LAUNCH), 1.0)
        stock.keep(7, Compiled(b"7", "k", LAUNCH), 9.0)
        assert [content(stock.kept(name)) for name in ("a", "b", "c", 7)] == [b"a", b"b", None, b"7"]


def test_files_live_as_long_as_they_are_kept(tmp_path: Path) -> None:
    with PrefetchedBuilds(kept=2) as stock:
        for number, micros in enumerate((30.0, 20.0, 10.0, 40.0)):
            built = on_disk(tmp_path, str(number))
            stock.keep(number, built, micros)
            built.cubin.unlink()
        assert [content(stock.kept(number)) for number in range(4)] == [None, b"1", b"2", None]
        kept = stock.kept(1)
        assert isinstance(kept, OnDisk) and len(list(kept.cubin.parent.iterdir())) == 2
        taken = stock.take(2)
        assert taken is not None and taken.result() == stock.kept(2)
        stock.keep(9, OnDisk(tmp_path / "gone", "k", LAUNCH), 1.0)
        assert stock.kept(9) is None, "one whose file is gone is built again"
    assert not kept.cubin.parent.exists()


def test_what_was_begun_is_built_once_and_not_after_the_end() -> None:
    asked: list[str] = []

    def build(name: str, at: BuildPlace) -> Built:
        asked.append(name)
        if name == "waits":
            at.stop.wait(60)
            raise CancelledError
        return on_disk(at.folder, name)

    with PrefetchedBuilds() as stock:
        stock.begin(["a", "b", "a"], build, workers=2)
        taken = [stock.take(name) for name in ("a", "b", "c")]
        assert taken[0] is not None and taken[1] is not None and taken[2] is None
        assert [content(one.result(20)) for one in taken[:2] if one is not None] == [b"a", b"b"]
        folder = taken[0].result().cubin
        assert stock.kept("a") is None, "it was not timed"
    assert sorted(asked) == ["a", "b"] and isinstance(folder, Path) and not folder.parent.exists()
    with PrefetchedBuilds() as stock:
        stock.begin(["waits", "late"], build, workers=1)
        waiting, late = stock.take("waits"), stock.take("late")
        assert waiting is not None and late is not None
        while "waits" not in asked:
            pass
    assert late.cancelled() and "late" not in asked
    with pytest.raises(CancelledError):
        waiting.result()
