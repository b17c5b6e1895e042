"""The queue of kernels to tune. Each function is one transaction, and all of them raise DatabaseFault.

    nothing, ended --submit--> queued --claim--> running --finish, fail--> succeeded, failed
                                  ^                 |
                                  +-- give_back, put_back, release: its worker left, failed by chance, or died

A worker that runs a job counts up its ``beat`` and is its only owner: what it says counts while the row names it. No
clock is needed for that (``leases.py``). ``cancel`` ends a queued job, and asks the owner of a running one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Any

import sqlalchemy as sa

from lospmm.settings import settings
from lospmm_server import admission, observations, teams
from lospmm_server.database import Database
from lospmm_server.faults import Cancelled, GaveUp
from lospmm_server.keys import Caller
from lospmm_server.problems import describe
from lospmm_server.schemas import Problem
from lospmm_server.tables import PENDING, events, kernels, layers, models

#: The queue's time that a turn of a key of weight 1 takes; of a greater weight, the fraction.
TURN = 1 << 20

Json = dict[str, Any]


class JobVerdict(Enum):
    """What a job's row tells the worker that runs it."""

    GO_ON = "go on"
    CANCEL = "cancel"
    LOST = "lost"  # it has another owner now


@dataclass(frozen=True, slots=True)
class KernelOrder:
    """A requested kernel. Its matrix is in the store, and so is its artifact if ``is_kept``."""

    digest: str
    request: Json  # jobs.Request.to_json
    gpu: str  # the GPU that it must run on; empty: none
    is_kept: bool = False
    estimated_micros: float | None = None  # forecast of the kept kernel


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a model: its order, the problem of one that could not be read, or why it is skipped."""

    name: str
    order: KernelOrder | None
    error: Problem | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """A requested model."""

    id: str
    name: str
    n: int  # 0: those of its layers differ
    device: str
    layers: Sequence[Layer]

    @property
    def orders(self) -> dict[str, KernelOrder]:
        """Orders by digest: equal layers have one."""
        return {layer.order.digest: layer.order for layer in self.layers if layer.order is not None}

    @property
    def new(self) -> list[str]:
        """Digests of the kernels that must be tuned."""
        return [digest for digest, order in self.orders.items() if not order.is_kept]


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that one worker owns, for the ``attempts``th time."""

    digest: str
    owner: str
    request: Json
    key: str
    model: str
    attempts: int


def submit(database: Database, order: KernelOrder, caller: Caller, name: str = "") -> None:
    """Queue a kernel for the caller's team by a file's name, unless it waits, runs or has succeeded. Raises Busy.

    If the kernel of a successful job is lost, ``requeue`` queues it again.
    """
    if order.is_kept:
        with database.read() as connection:  # a hit should write only once
            if teams.wants(connection, order.digest, caller.team):
                return
    with database.write() as connection:
        admission.check_room(connection, caller.name, [] if order.is_kept else [order.digest])
        _submit(connection, order, caller, name=name)


def submit_model(database: Database, model: ModelOrder, caller: Caller) -> None:
    """Queue every layer, equal ones once; all of them are accepted or none. Raises Busy."""
    with database.write() as connection:
        admission.check_room(connection, caller.name, model.new)
        connection.execute(sa.delete(layers).where(layers.c.model == model.id))
        connection.execute(sa.delete(models).where(models.c.id == model.id))
        turn = _event(connection, model.id, "posted", {"model": model.name, "layers": len(model.layers)})
        row = {"id": model.id, "turn": turn, "name": model.name, "n": model.n, "device": model.device}
        row |= {"key": caller.name, "team": caller.team, "cancel": False, "created": _now()}
        connection.execute(sa.insert(models).values(**row))
        connection.execute(sa.insert(layers), [_layer_row(model.id, *found) for found in enumerate(model.layers)])
        for order in model.orders.values():
            _submit(connection, order, caller, model=model.name)


def check_room(database: Database, key: str, digests: Sequence[str]) -> None:
    """Raise Busy if these jobs would be refused: call it before their matrices are stored."""
    with database.read() as connection:
        admission.check_room(connection, key, digests)


def claim(database: Database, owner: str, gpu: str) -> Claim | None:
    """Make ``owner`` the owner of the next job that a worker with this GPU may run; None: there is none.

    Keys take turns by their weights, by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a job begins at the
    queue's time, or when its key's last turn is over if that is later; next is who begins first, and then it is that
    time. So who comes new is next, and idle time earns nothing. The models of a key take turns too, with its single
    kernels as one more: next is that which was served longest ago, and of its jobs the oldest.

    One writer at a time makes this simple, and SKIP LOCKED useless: ids of events must follow their commits.
    """
    gpus = {"", gpu}
    with database.read() as connection:  # an idle worker must not block writers
        if not any(connection.execute(sa.select(_first(of))).scalar() for of in gpus):
            return None
    with database.write() as connection:
        found = [row for of in gpus for row in connection.execute(_next(of))]
        row = min(found, key=lambda row: (row.begin, row.last, row.turn), default=None)
        if row is None:
            return None
        _event(connection, row.digest, "running", {"attempt": row.attempts + 1})
        begun = {"state": "running", "owner": owner, "attempts": row.attempts + 1, "started": _now()}
        begun |= {"begun": row.begin, "beat": row.beat + 1, "stage": None, "progress": {}}
        _change(connection, row.digest, begun)
        return Claim(row.digest, owner, row.request, row.key, row.model, row.attempts + 1)


def beat(database: Database, claimed: Claim, stage: str | None, progress: Mapping[str, Sequence[int]]) -> JobVerdict:
    """Record that the owner lives, and its progress; return the verdict on the job."""
    with database.write() as connection:
        row = _owned(connection, claimed)
        if row is None:
            return JobVerdict.LOST
        told = {name: list(counts) for name, counts in progress.items()}
        _change(connection, claimed.digest, {"beat": row.beat + 1, "stage": stage, "progress": told})
        if told != row.progress:
            _event(connection, claimed.digest, "progress", {"stage": stage, "progress": told})
        return JobVerdict.CANCEL if row.cancel else JobVerdict.GO_ON


def look(database: Database, claimed: Claim) -> JobVerdict:
    """Return what ``beat`` would return, without writing."""
    with database.read() as connection:
        row = _owned(connection, claimed)
    return JobVerdict.LOST if row is None else JobVerdict.CANCEL if row.cancel else JobVerdict.GO_ON


def finish(database: Database, claimed: Claim, observation: Json) -> bool:
    """End a job whose artifact is in the store (``observations.succeeded``). False if it has a new owner."""
    speedups = observation.get("speedup_over_dense") or {}
    return _end(
        database, claimed, "succeeded", observation, {"speedup": observations.main_speedup(speedups), "error": None}
    )


def fail(database: Database, claimed: Claim, problem: Problem) -> bool:
    """End a job with a problem. False if it has a new owner."""
    return _end(database, claimed, "failed", *_failure(problem))


def give_back(database: Database, claimed: Claim) -> bool:
    """Return a job to the queue, or cancel it if that was requested: the attempt does not count."""
    with database.write() as connection:
        row = _owned(connection, claimed)
        if row is None:
            return False
        if row.cancel:
            _cancelled(connection, row.digest)
        else:
            waiting = {"state": "queued", "owner": None, "attempts": row.attempts - 1, "started": None, "begun": None}
            _change(connection, row.digest, waiting | {"stage": None, "progress": {}})
            _event(connection, row.digest, "queued", _queued(row.request, row.model))
        return True


def put_back(database: Database, claimed: Claim, problem: Problem) -> bool:
    """Return a job to the end of the queue, or fail it with ``problem`` if the attempt was the last."""
    with database.write() as connection:
        row = _owned(connection, claimed)
        if row is not None:
            _retry(connection, row, problem)
        return row is not None


def running(database: Database) -> dict[tuple[str, str], int]:
    """Return the beat of each running job, by its digest and owner."""
    columns = (kernels.c.digest, kernels.c.owner, kernels.c.beat)
    with database.read() as connection:
        rows = connection.execute(sa.select(*columns).where(kernels.c.state == "running")).all()
    return {(row.digest, row.owner): row.beat for row in rows}


def release(database: Database, digest: str, owner: str, seen_beat: int) -> bool:
    """Take a job from a dead worker, unless its beat has changed since ``seen_beat``."""
    with database.write() as connection:
        row = connection.execute(sa.select(kernels).where(kernels.c.digest == digest)).first()
        if row is None or (row.state, row.owner, row.beat) != ("running", owner, seen_beat):
            return False
        _release(connection, row)
        return True


def release_all_of(database: Database, owner: str) -> int:
    """Take all jobs from a worker that is known to have ended; return their number."""
    of_owner = (kernels.c.state == "running") & (kernels.c.owner == owner)
    with database.write() as connection:
        rows = connection.execute(sa.select(kernels).where(of_owner)).all()
        for row in rows:
            _release(connection, row)
        return len(rows)


def cancel(database: Database, job: str, team: str | None = None) -> bool:
    """Cancel a kernel, or a model with its kernels that nobody else posted. False for an unknown id.

    For a ``team``, jobs of others are unknown, and a kernel that others posted too goes on for them. An ended job
    stays as it is.
    """
    with database.write() as connection:
        if not teams.is_of(connection, job, team):
            return False
        row = connection.execute(sa.select(kernels).where(kernels.c.digest == job)).first()
        if row is not None:
            _cancel(connection, row, team)
            return True
        model = connection.execute(sa.select(models).where(models.c.id == job)).first()
        if model is None:
            return False
        _cancel_layers(connection, job, model.team)
        return True


def requeue(database: Database, digest: str) -> bool:
    """Queue a kernel again whose artifact was lost. False unless the job had succeeded."""
    with database.write() as connection:
        row = connection.execute(sa.select(kernels).where(kernels.c.digest == digest)).first()
        if row is None or row.state != "succeeded":
            return False
        _queue(connection, row, {"attempts": 0})
        return True


@cache  # to build it takes longer than to answer it, and others wait meanwhile
def _next(gpu: str) -> sa.Select[Any]:
    """Return a query of the next job for a GPU, with its ``begin`` and when its model was served ``last``.

    It jumps from key to key, and then from model to model of the chosen key, by an index: what else is queued does not
    count. Jobs are known by their turns here, which are unique.
    """
    at, other = kernels.alias("at"), kernels.alias("other")
    keys = sa.select(_first(gpu).label("turn")).cte("keys", recursive=True)
    of_next_key = sa.select(_first(gpu, kernels.c.key > at.c.key))
    keys = keys.union_all(of_next_key.join_from(keys, at, at.c.turn == keys.c.turn))
    over = sa.select(other.c.begun + TURN // other.c.weight).where(other.c.key == at.c.key, other.c.begun.is_not(None))
    over = over.order_by(other.c.begun.desc()).limit(1)  # its last turn
    now = sa.select(sa.func.coalesce(sa.func.max(other.c.begun), 0))
    of_keys = sa.select(at.c.key, at.c.turn, over.scalar_subquery().label("over"), now.scalar_subquery().label("now"))
    times = of_keys.join_from(keys, at, at.c.turn == keys.c.turn).cte("times")
    begin = sa.case((times.c.over > times.c.now, times.c.over), else_=times.c.now)
    chosen = sa.select(times.c.key, begin.label("begin")).order_by(begin, times.c.turn).limit(1).cte("chosen")
    of_first_model = sa.select(_first(gpu, kernels.c.key == chosen.c.key).label("turn"))
    lanes = of_first_model.select_from(chosen).cte("lanes", recursive=True)
    of_next_model = sa.select(_first(gpu, kernels.c.key == at.c.key, kernels.c.model > at.c.model))
    lanes = lanes.union_all(of_next_model.join_from(lanes, at, at.c.turn == lanes.c.turn))
    served = sa.select(sa.func.coalesce(sa.func.max(other.c.begun), -1))
    served = served.where(other.c.key == at.c.key, other.c.model == at.c.model)
    last = served.scalar_subquery().label("last")
    jobs = sa.select(at, chosen.c.begin, last).join_from(lanes, at, at.c.turn == lanes.c.turn).join(chosen, sa.true())
    return jobs.order_by(last, at.c.turn).limit(1)


def _first(gpu: str, *where: sa.ColumnElement[bool]) -> sa.ScalarSelect[Any]:
    """Return a query of the turn of the first queued job for a GPU, in the order of the index ``kernels_lanes``."""
    queued = sa.select(kernels.c.turn).where(kernels.c.state == "queued", kernels.c.gpu == gpu, *where)
    return queued.order_by(kernels.c.key, kernels.c.model, kernels.c.turn).limit(1).scalar_subquery()


def _submit(
    connection: sa.Connection, order: KernelOrder, caller: Caller, *, name: str | None = None, model: str = ""
) -> None:
    row = connection.execute(sa.select(kernels).where(kernels.c.digest == order.digest)).first()
    is_cancelled = row is not None and (row.cancel or row.state == "cancelled")  # its poster no longer wants it
    teams.post(connection, order.digest, caller.team, name=name, is_cancelled=is_cancelled)
    if row is not None and row.state in PENDING:
        _change(connection, order.digest, {"cancel": False})  # it was posted again
        return
    if row is not None and row.state == "succeeded" and name is not None:
        return
    wanted = {"request": order.request, "gpu": order.gpu, "attempts": 0}
    wanted |= {"key": caller.name, "weight": caller.terms.weight}
    if row is None:
        new = {"digest": order.digest, "turn": 0, "state": "queued", "beat": 0, "cancel": False, "progress": {}}
        connection.execute(sa.insert(kernels).values(**new, **wanted, model=model, created=_now()))
    if order.is_kept:
        kept = {"state": "succeeded", "error": None, "cancel": False, "ended": _now()}
        _change(connection, order.digest, wanted | kept)
        if row is None:
            told = {"search": {"estimated_micros": order.estimated_micros}}
            _change(connection, order.digest, {"turn": _event(connection, order.digest, "kept", told)})
        return
    _queue(connection, connection.execute(sa.select(kernels).where(kernels.c.digest == order.digest)).one(), wanted)


def _queue(connection: sa.Connection, row: Any, values: Mapping[str, Any]) -> None:
    turn = _event(connection, row.digest, "queued", _queued(row.request, row.model))
    waiting = {"state": "queued", "turn": turn, "owner": None, "cancel": False, "error": None, "stage": None}
    _change(connection, row.digest, {**waiting, "progress": {}, "started": None, "ended": None, **values})


def _queued(request: Json, model: str) -> Json:
    return observations.queued(nnz=request["nnz"], model=model)


def _failure(problem: Problem) -> tuple[Json, Json]:
    """Return the data of the event and the columns of the row."""
    error = problem.model_dump()
    return {**observations.failed(problem), "error": error}, {"error": error}


def _release(connection: sa.Connection, row: Any) -> None:
    where = f"in the stage {row.stage}" if row.stage else "at its beginning"
    message = f"{row.attempts} workers that ran this job have died, the last one {where}; post it again to retry"
    _retry(connection, row, describe(GaveUp(message)))


def _retry(connection: sa.Connection, row: Any, problem: Problem) -> None:
    if row.cancel:
        _cancelled(connection, row.digest)
    elif row.attempts >= settings().max_attempts:
        _ended(connection, row.digest, "failed", *_failure(problem))
    else:  # behind the others: if it kills workers, the others run first
        _queue(connection, row, {})


def _cancel(connection: sa.Connection, row: Any, team: str | None) -> None:
    """Cancel a pending job; for a team alone, if there is one and others want the kernel too."""
    if row.state in PENDING and team is not None and teams.leave(connection, row.digest, team):
        return
    if row.state == "queued":
        _cancelled(connection, row.digest)
    elif row.state == "running":
        _change(connection, row.digest, {"cancel": True})


def _cancel_layers(connection: sa.Connection, model: str, team: str) -> None:
    own = sa.select(layers.c.digest).where((layers.c.model == model) & layers.c.digest.is_not(None))
    only = teams.only_of(model, team) & kernels.c.state.in_(PENDING)
    rows = connection.execute(sa.select(kernels).where(only)).all()
    is_pending = kernels.c.digest.in_(own) & kernels.c.state.in_(PENDING)
    if connection.execute(sa.select(kernels.c.digest).where(is_pending).limit(1)).first() is None:
        return  # it has ended
    for row in rows:
        _cancel(connection, row, team)
    connection.execute(sa.update(models).where(models.c.id == model).values(cancel=True))
    _event(connection, model, "stopped", {"layers": len(rows)})


def _end(database: Database, claimed: Claim, state: str, data: Json, values: Mapping[str, Any]) -> bool:
    with database.write() as connection:
        if _owned(connection, claimed) is None:
            return False
        _ended(connection, claimed.digest, state, data, values)
        return True


def _cancelled(connection: sa.Connection, digest: str) -> None:
    _ended(connection, digest, "cancelled", {}, {"error": describe(Cancelled()).model_dump()})


def _ended(connection: sa.Connection, digest: str, state: str, data: Json, values: Mapping[str, Any]) -> None:
    _change(connection, digest, {"state": state, "owner": None, "cancel": False, "ended": _now(), **values})
    passed = (events.c.job == digest) & (events.c.kind == "progress")
    connection.execute(sa.delete(events).where(passed))  # later listeners do not need it
    _event(connection, digest, state, data)


def _owned(connection: sa.Connection, claimed: Claim) -> Any:
    mine = (kernels.c.digest == claimed.digest) & (kernels.c.owner == claimed.owner) & (kernels.c.state == "running")
    return connection.execute(sa.select(kernels).where(mine)).first()


def _change(connection: sa.Connection, digest: str, values: Mapping[str, Any]) -> None:
    connection.execute(sa.update(kernels).where(kernels.c.digest == digest).values(**values))


def _event(connection: sa.Connection, job: str, kind: str, data: Json) -> int:
    added = connection.execute(sa.insert(events).values(job=job, time=_now(), kind=kind, data=data))
    primary = added.inserted_primary_key
    assert primary is not None
    return int(primary[0])


def _layer_row(model: str, position: int, layer: Layer) -> Json:
    request = {} if layer.order is None else layer.order.request
    return {
        "model": model,
        "position": position,
        "name": layer.name,
        "digest": None if layer.order is None else layer.order.digest,
        **{side: request.get(side) for side in ("m", "k", "nnz")},
        "error": None if layer.error is None else layer.error.model_dump(),
        "skipped": layer.skipped,
    }


def _now() -> datetime:
    return datetime.now(UTC)
