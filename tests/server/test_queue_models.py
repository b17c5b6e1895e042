"""Models in the queue, on SQLite and on PostgreSQL: a batch of kernels, each of which may be others' too."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lospmm.errors import BadRequest, NothingFits
from lospmm_server import queries, queue
from lospmm_server.database import Database
from lospmm_server.faults import Busy
from lospmm_server.keys import NOBODY, Caller
from lospmm_server.problems import describe
from lospmm_server.queue import JobVerdict, ModelOrder
from tests.server.orders import claimed, model, order, state, submitted


@pytest.fixture
def database(either_database: Database) -> Database:
    return either_database


class TestModels:
    def job(self, database: Database, posted: ModelOrder) -> queries.JobRow:
        found = queries.find_job(database, posted.id)
        assert found is not None
        listed = queries.list_jobs(database, found.state, None, 50)  # the same state, as SQL has it
        assert posted.id in [job.id for job in listed]
        return found

    def test_equal_layers_are_tuned_once_and_a_bad_one_fails_alone(self, database: Database) -> None:
        posted = model(order(1), None, order(1), order(2))
        queue.submit_model(database, posted, Caller("team"))
        job = self.job(database, posted)
        assert (job.state, job.progress, job.name, job.key) == ("queued", {"layers": (1, 4)}, "net", "team")
        assert [layer.state for layer in job.layers] == ["queued", "failed", "queued", "queued"]
        queue.finish(database, claimed(database), {"search": {"estimated_micros": 1.5}})
        assert self.job(database, posted).state == "running"
        queue.finish(database, claimed(database), {})
        assert queue.claim(database, "worker", "") is None
        job = self.job(database, posted)
        assert (job.state, job.progress) == ("partial", {"layers": (4, 4)})
        assert [layer.state for layer in job.layers] == ["succeeded", "failed", "succeeded", "succeeded"]
        assert [layer.estimated_micros for layer in job.layers] == [1.5, None, 1.5, None]
        assert job.error.detail == "1 of 4 layers have no kernel: layer1: not a matrix"

    def test_a_model_whose_kernels_are_there(self, database: Database) -> None:
        posted = model(order(1, is_kept=True), replace(order(2, is_kept=True), estimated_micros=2.5))
        queue.submit_model(database, posted, NOBODY)
        job = self.job(database, posted)
        assert (job.state, [layer.estimated_micros for layer in job.layers]) == ("succeeded", [None, 2.5])
        assert queue.claim(database, "worker", "") is None

    def test_a_model_does_not_begin_before_it_is_posted(self, database: Database) -> None:
        submitted(database, 1)
        queue.finish(database, claimed(database), {})
        posted = model(order(1, is_kept=True), order(2))
        queue.submit_model(database, posted, NOBODY)
        job = self.job(database, posted)
        assert job.started == job.created and job.ended is None
        queue.finish(database, claimed(database), {})
        job = self.job(database, posted)
        assert job.created == job.started < job.ended

    def test_cancel_leaves_what_others_wait_for(self, database: Database) -> None:
        submitted(database, 1)
        mine, theirs = model(order(1), order(2), order(3), name="mine"), model(order(3), name="theirs")
        queue.submit_model(database, mine, NOBODY)
        queue.submit_model(database, theirs, NOBODY)
        assert queue.cancel(database, mine.id)
        assert self.job(database, mine).progress == {"layers": (0, 3)}
        (told,) = queries.events_after(database, [mine.id], 0)[-1:]
        assert (told.kind, told.data) == ("stopped", {"layers": 1})
        assert [state(database, number) for number in (1, 2, 3)] == ["queued", "cancelled", "queued"]
        assert self.job(database, mine).state == "cancelled"
        assert self.job(database, theirs).state == "queued"
        queue.cancel(database, theirs.id)
        assert state(database, 3) == "cancelled"
        queue.submit_model(database, mine, NOBODY)
        assert self.job(database, mine).state == "queued"

    def test_what_was_cancelled_stays_so_though_its_kernels_go_on(self, database: Database) -> None:
        mine, theirs = model(order(1), name="mine"), model(order(1), name="theirs")
        queue.submit_model(database, mine, NOBODY)
        queue.submit_model(database, theirs, NOBODY)
        queue.cancel(database, mine.id)
        cancelled = self.job(database, mine)
        assert (cancelled.state, cancelled.is_cancelling) == ("cancelled", False)
        assert cancelled.created <= cancelled.ended
        queue.finish(database, claimed(database), {})
        assert self.job(database, theirs).state == "succeeded"
        later = self.job(database, mine)
        assert (later.state, later.ended) == ("cancelled", cancelled.ended)

    @pytest.mark.parametrize("is_running", [False, True])
    def test_who_cancelled_a_kernel_does_not_keep_it_from_the_model(
        self, database: Database, *, is_running: bool
    ) -> None:
        """Posted alone and cancelled, it is the model's alone, and ends with it."""
        submitted(database, 1)
        mine = claimed(database) if is_running else None
        queue.cancel(database, order(1).digest)
        posted = model(order(1))
        queue.submit_model(database, posted, NOBODY)
        assert self.job(database, posted).state == ("running" if is_running else "queued")
        queue.cancel(database, posted.id)
        if mine is not None:
            assert queue.look(database, mine) is JobVerdict.CANCEL
            queue.give_back(database, mine)
        assert state(database, 1) == "cancelled"

    @pytest.mark.parametrize(
        ("ends", "expected"),
        [
            ([], "queued"),
            (["succeeded"], "running"),
            (["succeeded", "succeeded"], "succeeded"),
            (["succeeded", "failed"], "partial"),
            (["cancelled", "failed"], "failed"),
            (["cancelled", "succeeded"], "cancelled"),
        ],
    )
    def test_its_state_follows_from_its_layers(self, database: Database, ends: Sequence[str], expected: str) -> None:
        posted = model(order(1), order(2))
        queue.submit_model(database, posted, NOBODY)
        for end in ends:
            mine = claimed(database)
            if end == "succeeded":
                queue.finish(database, mine, {})
            elif end == "failed":
                queue.fail(database, mine, describe(NothingFits("no tile size fits")))
            else:
                queue.cancel(database, mine.digest)
                queue.give_back(database, mine)
        assert self.job(database, posted).state == expected

    def test_all_layers_are_accepted_or_none(
        self, database: Database, set_environment: Callable[[str, object], None]
    ) -> None:
        set_environment("LOSPMM_MAX_JOBS", 3)
        submitted(database, 1, 2)
        with pytest.raises(Busy):
            queue.submit_model(database, model(order(1), order(3), order(4)), NOBODY)
        assert queries.find_job(database, order(3).digest) is None
        queue.submit_model(database, model(order(1), order(2), order(3)), NOBODY)
        with pytest.raises(BadRequest, match="4 jobs at once, more than the 3"):
            queue.submit_model(database, model(*map(order, (5, 6, 7, 8))), NOBODY)

    def test_more_than_a_key_may_ever_have_is_not_to_be_tried_again(
        self, database: Database, set_environment: Callable[[str, object], None]
    ) -> None:
        set_environment("LOSPMM_MAX_JOBS", 3)
        set_environment("LOSPMM_MAX_JOBS_PER_KEY", 2)
        queue.submit(database, order(1), Caller("another"))
        with pytest.raises(BadRequest, match="3 jobs at once, more than the 2 that this service takes of one key"):
            queue.submit_model(database, model(*map(order, (2, 3, 4))), Caller("mine"))
