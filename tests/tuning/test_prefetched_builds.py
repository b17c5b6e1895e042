"""Kernels that need not be built when they are asked for: the fastest are kept, and no file is left."""

import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.families.candidate import Candidate, unrolled
from lospmm.problem.launch import Launch
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.toolchain.compile import Built, Compiled, OnDisk
from lospmm.tuning.builders import BuildPlace, PrefetchedBuilds

LAUNCH = Launch((1, 1, 1), 32)
TILING = Tiling(8, *np.empty((5, 0), np.int64))
UNROLLED = [unrolled(UnrolledPlan(TileSize(8, 32), Schedule(number), TILING)) for number in range(13)]
PLANS = [Candidate("csr", name, 1.0) for name in ("a", "b", "c")]


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
    with PrefetchedBuilds(kept=4) as builds:
        for number, micros in timed:
            candidate = UNROLLED[number]
            builds.keep(candidate, Compiled(b"%d" % number, "k", LAUNCH), micros)
            if builds.kept(candidate) is not None:
                builds.keep(candidate, Compiled(b"another", "k", LAUNCH), micros / 2)  # the first one stays
        fastest = sorted(timed, key=lambda one: one[1])[:4]
        limit = fastest[-1][1] if fastest else 0
        for number, micros in timed:
            if micros < limit or len(timed) <= 4:
                assert content(builds.kept(UNROLLED[number])) == b"%d" % number
            elif micros > limit:
                assert builds.kept(UNROLLED[number]) is None and builds.take(UNROLLED[number]) is None


def test_unrolled_candidates_and_others_have_places_of_their_own() -> None:
    """One kind's fastest do not push out the other's, each of which is timed again."""
    with PrefetchedBuilds(kept=2) as builds:
        for candidate in PLANS:
            builds.keep(candidate, Compiled(candidate.plan.encode(), "k", LAUNCH), 1.0)
        builds.keep(UNROLLED[7], Compiled(b"7", "k", LAUNCH), 9.0)
        assert [content(builds.kept(one)) for one in (*PLANS, UNROLLED[7])] == [b"a", b"b", None, b"7"]


def test_files_live_as_long_as_they_are_kept(tmp_path: Path) -> None:
    with PrefetchedBuilds(kept=2) as builds:
        for number, micros in enumerate((30.0, 20.0, 10.0, 40.0)):
            built = on_disk(tmp_path, str(number))
            builds.keep(UNROLLED[number], built, micros)
            built.cubin.unlink()
        assert [content(builds.kept(one)) for one in UNROLLED[:4]] == [None, b"1", b"2", None]
        kept = builds.kept(UNROLLED[1])
        assert isinstance(kept, OnDisk) and len(list(kept.cubin.parent.iterdir())) == 2
        taken = builds.take(UNROLLED[2])
        assert taken is not None and taken.result() == builds.kept(UNROLLED[2])
        builds.keep(UNROLLED[9], OnDisk(tmp_path / "gone", "k", LAUNCH), 1.0)
        assert builds.kept(UNROLLED[9]) is None, "one whose file is gone is built again"
    assert not kept.cubin.parent.exists()


def test_what_was_begun_is_built_once_and_not_after_the_end() -> None:
    asked: list[Candidate] = []
    first, second, third = PLANS

    def build(candidate: Candidate, at: BuildPlace) -> Built:
        asked.append(candidate)
        if candidate is third:
            at.stop.wait(60)
            raise CancelledError
        return on_disk(at.folder, candidate.plan)

    with PrefetchedBuilds() as builds:
        builds.begin(first, build)
        taken, none = builds.take(first), builds.take(second)
        assert taken is not None and none is None and content(taken.result(20)) == b"a"
        folder = taken.result().cubin
        assert builds.kept(first) is None, "it was not timed"
    assert asked == [first]
    assert isinstance(folder, Path) and not folder.parent.exists()
    asked.clear()
    with PrefetchedBuilds() as builds:
        builds.begin(third, build)
        waiting = builds.take(third)
        assert waiting is not None
        while third not in asked:
            time.sleep(0.001)
    with pytest.raises(CancelledError):
        waiting.result()
