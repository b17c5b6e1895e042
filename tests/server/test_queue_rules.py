"""The queue against a model of it: whatever is done in whatever order, by owners old and new."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lospmm.errors import NothingFits
from lospmm.settings import settings
from lospmm_server import queries, queue
from lospmm_server.database import open_database
from lospmm_server.keys import Caller, Terms
from lospmm_server.problems import describe
from lospmm_server.queue import Claim, JobVerdict, KernelOrder
from lospmm_server.tables import STATES

JOBS = st.integers(0, 3)
TEAMS = st.sampled_from(["", "a", "b"])


def digest(number: int) -> str:
    return f"{number:064x}"


class Jobs(RuleBasedStateMachine):
    """Four jobs, any number of workers, each of which ends with its first job."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.database = open_database(f"sqlite:///{Path(self.folder.name) / 'jobs.db'}")
        self.database.migrate()
        self.claims: list[Claim] = []  # of all workers there ever were
        self.states: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.told: set[str] = set()  # running, and asked to stop
        self.posted: dict[str, set[str]] = {}  # the teams that posted a job, and those that still want it
        self.wanted: dict[str, set[str]] = {}

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    def is_owner(self, claim: Claim) -> bool:
        return self.owners.get(claim.digest) == claim.owner

    def end(self, job: str, state: str) -> None:
        self.states[job] = state
        self.owners.pop(job, None)
        self.told.discard(job)

    @rule(number=JOBS, team=TEAMS)
    def submit(self, number: int, team: str) -> None:
        job = digest(number)
        queue.submit(
            self.database, KernelOrder(job, {"nnz": 1}, ""), Caller(terms=Terms(team=team) if team else Terms())
        )
        if self.states.get(job) == "cancelled" or job in self.told:
            self.wanted[job].clear()
        self.posted.setdefault(job, set()).add(team)
        self.wanted.setdefault(job, set()).add(team)
        if self.states.get(job) not in ("queued", "running", "succeeded"):
            self.states[job], self.attempts[job] = "queued", 0
        self.told.discard(job)

    @rule()
    def claim(self) -> None:
        claim = queue.claim(self.database, f"worker{len(self.claims)}", "")
        assert (claim is not None) == ("queued" in self.states.values())
        if claim is None:
            return
        assert self.states[claim.digest] == "queued"
        self.attempts[claim.digest] += 1
        assert claim.attempts == self.attempts[claim.digest]
        self.states[claim.digest], self.owners[claim.digest] = "running", claim.owner
        self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "give_back", "beat", "look"]))
    def say(self, data: st.DataObject, how: str) -> None:
        """What a worker says counts while it is the owner, however late."""
        claim = data.draw(st.sampled_from(self.claims))
        is_owner, is_told = self.is_owner(claim), claim.digest in self.told
        match how:
            case "finish":
                assert queue.finish(self.database, claim, {}) == is_owner
            case "fail":
                assert queue.fail(self.database, claim, describe(NothingFits("no"))) == is_owner
            case "give_back":
                assert queue.give_back(self.database, claim) == is_owner
            case _:
                ask = queue.look if how == "look" else lambda *asked: queue.beat(*asked, None, {})
                expected = JobVerdict.LOST if not is_owner else JobVerdict.CANCEL if is_told else JobVerdict.GO_ON
                assert ask(self.database, claim) is expected
                return
        if not is_owner:
            return
        if how != "give_back":
            self.end(claim.digest, {"finish": "succeeded", "fail": "failed"}[how])
        elif is_told:
            self.end(claim.digest, "cancelled")
        else:
            self.end(claim.digest, "queued")
            self.attempts[claim.digest] -= 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.owners)))
        assert queue.release_all_of(self.database, self.owners[job]) == 1
        is_poison = self.attempts[job] >= settings().max_attempts
        self.end(job, "cancelled" if job in self.told else "failed" if is_poison else "queued")

    @rule(number=JOBS, team=st.none() | TEAMS)
    def cancel(self, number: int, team: str | None) -> None:
        job = digest(number)
        knows = job in self.states if team is None else team in self.posted.get(job, ())
        assert queue.cancel(self.database, job, team) == knows
        is_pending = self.states.get(job) in ("queued", "running")
        if not knows:
            return
        if team is not None and is_pending and self.wanted[job] - {team}:
            self.wanted[job].discard(team)
        elif self.states.get(job) == "queued":
            self.end(job, "cancelled")
        elif self.states.get(job) == "running":
            self.told.add(job)

    @rule(number=JOBS)
    def lose(self, number: int) -> None:
        """Its artifact was damaged."""
        job = digest(number)
        assert queue.requeue(self.database, job) == (self.states.get(job) == "succeeded")
        if self.states.get(job) == "succeeded":
            self.states[job], self.attempts[job] = "queued", 0

    @invariant()
    def a_team_sees_what_it_has_posted(self) -> None:
        for team in ("", "a", "b"):
            seen = {job.id: job.state for job in queries.list_jobs(self.database, None, None, 50, team)}
            mine = {job for job, teams in self.posted.items() if team in teams}
            assert seen == {job: self.states[job] if team in self.wanted[job] else "cancelled" for job in mine}
            assert {job: queries.find_job(self.database, job, team) is not None for job in self.states} == {
                job: job in mine for job in self.states
            }

    @invariant()
    def the_tables_say_the_same(self) -> None:
        found = {state: queries.list_jobs(self.database, state, None, 50) for state in STATES}
        assert {job.id: state for state, jobs in found.items() for job in jobs} == self.states
        assert set(queue.running(self.database)) == set(self.owners.items())
        for jobs in found.values():
            for job in jobs:
                assert (job.attempts, job.is_cancelling) == (self.attempts[job.id], job.id in self.told)
                last = queries.events_after(self.database, [job.id], 0)[-1]
                assert last.kind in (job.state, "progress")


@pytest.mark.usefixtures("own_settings")
class TestJobs(Jobs.TestCase):
    settings = hypothesis_settings(max_examples=3, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_settings")
class TestJobsForLong(Jobs.TestCase):
    settings = hypothesis_settings(max_examples=5, stateful_step_count=40, deadline=None)
