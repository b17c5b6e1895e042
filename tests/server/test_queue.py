"""The queue, on SQLite and on PostgreSQL: what is accepted is done once, and survives whoever works on it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from lospmm.errors import BadSettings, NothingFits
from lospmm_server import queries, queue, retention
from lospmm_server.database import Database, open_database
from lospmm_server.faults import Busy, DatabaseFault
from lospmm_server.keys import NOBODY, Caller, Terms
from lospmm_server.problems import describe
from lospmm_server.queue import Claim, JobVerdict
from lospmm_server.tables import metadata
from tests.server.orders import claimed, model, order, state, submitted

pytestmark = pytest.mark.usefixtures("either_database")


@pytest.fixture
def database(either_database: Database) -> Database:
    return either_database


def kinds(database: Database, job: str) -> list[str]:
    return [event.kind for event in queries.events_after(database, [job], 0)]


def test_the_tables_are_what_the_migrations_make(database: Database) -> None:
    database.migrate()  # twice is once
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_migrations_at_once(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.text("DROP TABLE alembic_version"))
        metadata.drop_all(connection)
    others = [open_database() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Database.migrate, others))
    for other in others:
        other.close()
    submitted(database, 1)


def test_a_later_version_of_the_tables_is_refused(database: Database) -> None:
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseFault, match="made by a later version of lospmm"):
        database.migrate()


def test_the_life_of_a_job(database: Database) -> None:
    submitted(database, 1)
    assert state(database, 1) == "queued"
    mine = claimed(database)
    assert (mine.digest, mine.request["nnz"], mine.attempts) == (order(1).digest, 1, 1)
    assert queue.claim(database, "other", "") is None
    assert queue.beat(database, mine, "compile", {"compile": (1, 2)}) is JobVerdict.GO_ON
    job = queries.find_job(database, mine.digest)
    assert job is not None
    assert (job.state, job.stage, job.progress, job.attempts) == ("running", "compile", {"compile": (1, 2)}, 1)
    assert kinds(database, mine.digest) == ["queued", "running", "progress"]
    assert queue.finish(database, mine, {"speedup_over_dense": {"fp32": 2.5}})
    job = queries.find_job(database, mine.digest)
    assert job is not None
    assert (job.state, job.speedup, job.error) == ("succeeded", 2.5, None)
    assert None not in (job.created, job.started, job.ended)
    assert kinds(database, mine.digest) == ["queued", "running", "succeeded"]  # the progress is history
    assert queue.claim(database, "worker", "") is None


def test_jobs_are_done_in_the_order_in_which_they_came(database: Database) -> None:
    submitted(database, 3, 1, 2)
    assert [int(claimed(database).digest, 16) for _ in range(3)] == [3, 1, 2]


def test_keys_take_turns(database: Database) -> None:
    """A small job behind five large models of another key waits for one layer, and the key's next for one more."""
    for number in range(5):
        layers = [order(10 * number + at) for at in range(1, 5)]
        queue.submit_model(database, model(*layers, name=f"large{number}"), Caller("large"))
    first = claimed(database)  # and not yet done when the small ones come
    submitted(database, 101, 102, key="small")
    queue.finish(database, first, {})
    taken = done(database, 4)
    assert taken[0] == 101
    assert taken[2] == 102
    assert {taken[1], taken[3]} < set(range(1, 50))


def done(database: Database, count: int) -> list[int]:
    """The numbers of the next jobs, done one after the other."""
    taken = []
    for _ in range(count):
        one = claimed(database)
        queue.finish(database, one, {})
        taken.append(int(one.digest, 16))
    return taken


def test_a_keys_weight_is_its_share_of_the_turns(database: Database) -> None:
    """However many jobs each has, and for all the time: nobody waits longer than for a turn of all others."""
    for first, (key, weight) in {100: ("one", 1), 200: ("two", 2), 300: ("five", 5)}.items():
        submitted(database, *range(first, first + 40), key=key, weight=weight)
    taken = [number // 100 for number in done(database, 40)]
    for at in range(0, 40, 8):
        assert sorted(taken[at : at + 8]) == [1, 2, 2, 3, 3, 3, 3, 3], taken


def test_who_comes_new_is_next_whatever_the_others_weight(database: Database) -> None:
    """And earns nothing by waiting: the other goes on with its share at once."""
    for number in range(5):
        layers = [order(100 * number + at) for at in range(1, 21)]
        heavy = Caller("large", terms=Terms(weight=4))
        queue.submit_model(database, model(*layers, name=f"large{number}"), heavy)
    done(database, 20)
    first = claimed(database)
    submitted(database, *range(901, 911), key="small")
    queue.finish(database, first, {})
    assert [number > 900 for number in done(database, 11)] == [True, *[False] * 4, True, *[False] * 4, True]


def test_models_of_a_key_take_turns_and_single_kernels_too(database: Database) -> None:
    queue.submit_model(database, model(*(order(at) for at in range(1, 101)), name="hundred"), NOBODY)
    queue.submit_model(database, model(order(201), order(202), name="two"), NOBODY)
    submitted(database, 301, 302)
    assert [int(claimed(database).digest, 16) for _ in range(8)] == [1, 201, 301, 2, 202, 302, 3, 4]


def test_a_claim_reads_an_index_and_not_the_queue(database: Database) -> None:
    """Of PostgreSQL the plan depends on what it counted last; SQLite's is the same for any queue."""
    if database.file is None:
        pytest.skip("PostgreSQL plans by its statistics")
    submitted(database, 1, 2)
    asked: list[tuple[str, object]] = []

    @sa.event.listens_for(database.engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, text: str, values: object, *_: object) -> None:
        if text.startswith(("WITH", "SELECT")):
            asked.append((text, values))

    claimed(database)
    sa.event.remove(database.engine, "before_cursor_execute", note)
    with database.read() as connection:
        plans = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all() for text, values in asked]
    steps = [row.detail for plan in plans for row in plan]
    assert len([step for step in steps if "USING COVERING INDEX kernels_lanes (state=? AND gpu=?" in step]) >= 4, steps
    assert [step for step in steps if step.startswith("SCAN") and "kernels" in step] == []


def test_who_gives_a_job_back_keeps_the_turn(database: Database) -> None:
    submitted(database, 1, 2, key="mine")
    submitted(database, 3, key="theirs")
    mine = claimed(database)
    queue.beat(database, mine, "compile", {"compile": (1, 2)})
    assert queue.give_back(database, mine)
    job = queries.find_job(database, mine.digest)
    assert job is not None
    assert (job.state, job.stage, job.progress) == ("queued", None, {})
    assert [int(claimed(database).digest, 16) for _ in range(3)] == [1, 3, 2]


def test_a_job_posted_twice_is_one(database: Database) -> None:
    submitted(database, 1, 1)
    mine = claimed(database)
    submitted(database, 1)
    assert queue.claim(database, "other", "") is None
    assert queue.finish(database, mine, {})
    assert kinds(database, mine.digest) == ["queued", "running", "succeeded"]


def test_many_who_post_and_many_who_claim_at_once(database: Database) -> None:
    """40 jobs, each posted by four and claimed by one of four."""
    begin = threading.Barrier(8)

    def post(_: int) -> None:
        begin.wait(120)
        submitted(database, *range(1, 41))

    def take(worker: int) -> list[str]:
        begin.wait(120)
        found: list[str] = []
        while len(done) < 40:
            one = queue.claim(database, f"worker{worker}", "")
            if one is not None:
                assert queue.finish(database, one, {})
                found.append(one.digest)
                done.add(one.digest)
        return found

    done: set[str] = set()
    with ThreadPoolExecutor(8) as pool:
        posts = [pool.submit(post, number) for number in range(4)]
        takes = [pool.submit(take, number) for number in range(4)]
        for future in posts:
            future.result(60)
        taken = [digest for future in takes for digest in future.result(60)]
    assert sorted(taken) == [order(number).digest for number in range(1, 41)]  # each once
    assert all(state(database, number) == "succeeded" for number in range(1, 41))


def test_ids_of_events_follow_their_commits(database: Database) -> None:
    """Whoever has seen an event has seen all those before it: no transaction commits a smaller id later."""
    seen: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.extend(event.id for event in queries.events_after(database, None, seen[-1] if seen else 0))

    with ThreadPoolExecutor(5) as pool:
        looker = pool.submit(look)
        list(pool.map(lambda part: submitted(database, *part), [range(at, 101, 4) for at in range(1, 5)]))
        stop.set()
        looker.result(20)
    expected = [event.id for event in queries.events_after(database, None, 0)]
    assert seen == expected[: len(seen)]
    assert len(expected) == 100


def test_a_job_that_needs_a_gpu_waits_for_one(database: Database) -> None:
    queue.submit(database, order(1, gpu="h200"), NOBODY)
    submitted(database, 2)
    assert queue.claim(database, "worker", "a100").digest == order(2).digest
    assert queue.claim(database, "worker", "") is None
    assert queue.claim(database, "worker", "h200").digest == order(1).digest


def test_keys_and_models_take_turns_whatever_gpu_they_need(database: Database) -> None:
    both = model(order(1, gpu="h200"), order(2, gpu="h200"), name="needs one")
    queue.submit_model(database, both, Caller("both"))
    queue.submit_model(database, model(order(3), order(4), name="needs none"), Caller("both"))
    submitted(database, 5, 6, key="none")
    taken = [queue.claim(database, "worker", "h200").digest for _ in range(6)]
    assert [int(digest, 16) for digest in taken] == [1, 5, 3, 6, 2, 4]


class TestOwners:
    """Only the owner's word counts."""

    @pytest.fixture
    def lost(self, database: Database) -> Claim:
        """The claim of a worker whose job was released and taken by another."""
        submitted(database, 1)
        old = claimed(database, "old")
        beats = queue.running(database)
        assert queue.release(database, old.digest, "old", beats[(old.digest, "old")])
        assert claimed(database, "new").attempts == 2
        return old

    def test_what_a_former_owner_says(self, database: Database, lost: Claim) -> None:
        assert queue.beat(database, lost, "emit", {}) is JobVerdict.LOST
        assert queue.look(database, lost) is JobVerdict.LOST
        assert not queue.finish(database, lost, {})
        assert not queue.fail(database, lost, describe(NothingFits("no")))
        assert not queue.give_back(database, lost)
        assert state(database, 1) == "running"
        assert list(queue.running(database)) == [(lost.digest, "new")]

    def test_one_that_stirred_keeps_its_job(self, database: Database) -> None:
        submitted(database, 1)
        mine = claimed(database)
        seen = queue.running(database)[(mine.digest, "worker")]
        assert queue.beat(database, mine, None, {}) is JobVerdict.GO_ON
        assert not queue.release(database, mine.digest, "worker", seen)
        assert queue.finish(database, mine, {})
        assert not queue.release(database, mine.digest, "worker", seen + 1)

    def test_all_jobs_of_a_worker_that_has_ended(self, database: Database) -> None:
        submitted(database, 1, 2)
        claimed(database, "dead"), claimed(database, "alive")
        assert queue.release_all_of(database, "dead") == 1
        assert [state(database, number) for number in (1, 2)] == ["queued", "running"]


def test_who_gives_back_loses_no_attempt(database: Database) -> None:
    submitted(database, 1, 2)
    for _ in range(5):
        mine = claimed(database)
        assert (mine.digest, mine.attempts) == (order(1).digest, 1)
        assert queue.give_back(database, mine)


def test_a_poison_job_gives_up_after_three(database: Database) -> None:
    submitted(database, 1, 2)
    for attempt in (1, 2, 3):
        poisoned = claimed(database, f"dead{attempt}")
        while poisoned.digest != order(1).digest:  # it comes back behind the others
            assert queue.finish(database, poisoned, {})
            poisoned = claimed(database, f"dead{attempt}")
        assert poisoned.attempts == attempt
        queue.beat(database, poisoned, "compile", {})
        assert queue.release_all_of(database, f"dead{attempt}") == 1
    job = queries.find_job(database, order(1).digest)
    assert job is not None
    assert (job.state, job.attempts, job.error.type, job.error.status) == ("failed", 3, "/problems/gave-up", 500)
    assert "3 workers that ran this job have died, the last one in the stage compile" in job.error.detail
    assert queue.claim(database, "worker", "") is None
    submitted(database, 1)  # a failure is not final
    assert claimed(database).attempts == 1


class TestCancel:
    def test_what_waits_ends_at_once(self, database: Database) -> None:
        submitted(database, 1)
        assert queue.cancel(database, order(1).digest)
        job = queries.find_job(database, order(1).digest)
        assert job is not None
        assert (job.state, job.error.type) == ("cancelled", "/problems/cancelled")
        assert queue.claim(database, "worker", "") is None
        submitted(database, 1)
        assert claimed(database).digest == order(1).digest

    def test_what_runs_is_told(self, database: Database) -> None:
        submitted(database, 1)
        mine = claimed(database)
        assert queue.cancel(database, mine.digest)
        assert (state(database, 1), queue.look(database, mine)) == ("running", JobVerdict.CANCEL)
        assert queue.beat(database, mine, None, {}) is JobVerdict.CANCEL
        assert queue.give_back(database, mine)
        assert state(database, 1) == "cancelled"

    def test_one_that_dies_meanwhile_is_not_begun_again(self, database: Database) -> None:
        submitted(database, 1)
        queue.cancel(database, claimed(database, "dead").digest)
        queue.release_all_of(database, "dead")
        assert state(database, 1) == "cancelled"

    def test_one_that_is_posted_again_meanwhile_goes_on(self, database: Database) -> None:
        submitted(database, 1)
        mine = claimed(database)
        queue.cancel(database, mine.digest)
        submitted(database, 1)
        assert queue.look(database, mine) is JobVerdict.GO_ON
        assert queue.give_back(database, mine)  # it had been told already
        assert state(database, 1) == "queued"

    def test_what_has_ended_stays(self, database: Database) -> None:
        submitted(database, 1)
        queue.finish(database, claimed(database), {})
        assert queue.cancel(database, order(1).digest)
        assert state(database, 1) == "succeeded"
        assert not queue.cancel(database, "0" * 64)


def test_one_key_does_not_fill_the_queue(database: Database, set_environment: Callable[[str, object], None]) -> None:
    set_environment("LOSPMM_MAX_JOBS_PER_KEY", 2)
    set_environment("LOSPMM_MAX_JOBS", 3)
    submitted(database, 1, 2, key="one")
    with pytest.raises(Busy, match="2 jobs of this key are under way, and this service takes 2"):
        submitted(database, 3, key="one")
    submitted(database, 1, key="one")  # is under way
    submitted(database, 4, key="two")
    with pytest.raises(Busy, match="3 jobs are under way, and this service takes 3"):
        submitted(database, 5, key="two")
    queue.finish(database, claimed(database), {})
    submitted(database, 3, key="one")


def test_lists_go_on_where_they_stopped(database: Database) -> None:
    submitted(database, *range(1, 6))
    posted = model(order(1), order(9))
    queue.submit_model(database, posted, NOBODY)
    first = queries.list_jobs(database, None, None, 4)
    rest = queries.list_jobs(database, None, first[-1].turn, 4)
    expected = [posted.id, *(order(number).digest for number in (5, 4, 3, 2, 1))]  # not the layer
    assert [job.id for job in first + rest] == expected
    claimed(database)
    assert [job.id for job in queries.list_jobs(database, "running", None, 50)] == [posted.id, order(1).digest]


def test_what_has_ended_is_forgotten_but_not_while_a_model_needs_it(database: Database) -> None:
    submitted(database, 1, 2, 3)
    queue.submit_model(database, model(order(4)), NOBODY)
    for _ in range(4):
        queue.finish(database, claimed(database), {})
    submitted(database, 5)
    retention.forget(database, keep=1)
    known = [queries.find_job(database, order(number).digest) is not None for number in range(1, 6)]
    assert known == [False, False, True, True, True]
    assert kinds(database, order(1).digest) == []
    retention.forget(database, keep=0)
    assert [state(database, 5)] == ["queued"]
    assert queries.find_job(database, order(4).digest) is None  # its model was the first to go


def test_the_figures_of_the_queue(database: Database) -> None:
    assert queries.figures(database).oldest_seconds == 0
    submitted(database, 1, 2, 3)
    claimed(database)
    figures = queries.figures(database)
    assert (figures.queued, figures.running) == (2, 1)
    assert 0 <= figures.oldest_seconds < 20


def test_what_is_queued_again_has_waited_since_then(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not since it was posted first: a kernel may be lost from the cache long after it was made."""
    with monkeypatch.context() as earlier:
        earlier.setattr(queue, "_now", lambda: datetime.now(UTC) - timedelta(days=7))
        submitted(database, 1, 2)
        assert queries.figures(database).oldest_seconds > 6 * 86400
        for _ in range(2):
            queue.finish(database, claimed(database), {})
    assert queue.requeue(database, order(1).digest)
    assert 0 <= queries.figures(database).oldest_seconds < 20


def test_what_is_given_back_keeps_its_age(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it keeps its place: for who posted it, it has waited since then."""
    with monkeypatch.context() as earlier:
        earlier.setattr(queue, "_now", lambda: datetime.now(UTC) - timedelta(days=7))
        submitted(database, 1)
        mine = claimed(database)
    assert queue.give_back(database, mine)
    assert queries.figures(database).oldest_seconds > 6 * 86400


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "not a URL"),
        ("mysql://host/name", "'mysql' is none of sqlite, postgresql"),
        ("sqlite://", "name a file"),
        ("sqlite:///:memory:", "name a file"),
        ("sqlite:///file::memory:?uri=true", "name a file"),
        ("postgresql://user:word@host:port/name", "not a URL"),
        ("postgresql://user:word@[::1/name", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, says: str) -> None:
    with pytest.raises(BadSettings, match=f"LOSPMM_DATABASE_URL: .*{says}"):
        open_database(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@127.0.0.1:1/name",
        "postgresql://user@127.0.0.1:1/name?password=secret",
        "postgresql://user@/name?host=127.0.0.1&port=1&sslpassword=secret&sslkey=/etc/key",
    ],
)
def test_no_password_is_told(url: str) -> None:
    database = open_database(url)
    with pytest.raises(DatabaseFault) as fault, database.read():
        pass
    assert "secret" not in f"{fault.value} {database.name}"
    assert "127.0.0.1" in str(fault.value)
    database.close()
