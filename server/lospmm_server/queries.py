"""Queries about jobs, for the routes, the page and the metrics. Each function is one transaction.

A model has no state of its own: it follows from those of its kernels. Where a ``team`` is given, there is only what
it has posted. All functions raise DatabaseFault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

import sqlalchemy as sa

from lospmm_server import teams
from lospmm_server.database import Database
from lospmm_server.faults import Cancelled, LayersFailed
from lospmm_server.metrics import QueueFigures
from lospmm_server.problems import describe
from lospmm_server.schemas import Problem
from lospmm_server.tables import ENDED, PENDING, SKIPPED, events, kernels, layers, models, postings

#: Failed layers that the error of a model names.
NAMED_LAYERS = 3

#: The time of a model's last cancellation.
_STOPPED = (
    sa.select(sa.func.max(events.c.time))
    .where((events.c.job == models.c.id) & (events.c.kind == "stopped"))
    .scalar_subquery()
    .label("stopped")
)


#: The forecast of a layer's kernel, from the last event that has one.
_ESTIMATED = (
    sa.select(events.c.data["search"]["estimated_micros"].as_float())
    .where((events.c.job == layers.c.digest) & events.c.kind.in_(("succeeded", "kept")))
    .order_by(events.c.id.desc())
    .limit(1)
    .scalar_subquery()
    .label("estimated_micros")
)


def _count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.count().filter(condition)


def _state_of_model() -> sa.ColumnElement[str]:
    """Return a query of the state of a model, which follows from those of its layers."""
    state = sa.case(
        (layers.c.skipped.is_not(None), SKIPPED),
        (layers.c.error.is_not(None) | kernels.c.state.is_(None), "failed"),
        else_=kernels.c.state,
    )
    readable = _count(layers.c.digest.is_not(None))
    of_model = sa.case(
        (models.c.cancel, "cancelled"),
        ((readable > 0) & (_count(state == "queued") == readable), "queued"),
        (_count(state.in_(PENDING)) > 0, "running"),
        ((_count(state == "failed") > 0) & (_count(state == "succeeded") > 0), "partial"),
        (_count(state == "failed") > 0, "failed"),
        (_count(state == "cancelled") > 0, "cancelled"),
        else_="succeeded",
    )
    joined = layers.outerjoin(kernels, kernels.c.digest == layers.c.digest)
    own = sa.select(of_model).select_from(joined).where(layers.c.model == models.c.id)
    return own.correlate(models).scalar_subquery()


#: Columns of B of a layer's kernel.
_COLUMNS = kernels.c.request["n"].as_integer().label("n")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """A layer of a model; one that could not be read has no digest and no sizes."""

    name: str
    state: str
    n: int | None = None
    digest: str | None = None
    stage: str | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    error: Problem | None = None
    m: int | None = None
    k: int | None = None
    nnz: int | None = None
    speedup: float | None = None  # over dense cuBLAS, where both were timed
    estimated_micros: float | None = None  # forecast of one launch
    skipped: str | None = None  # why no kernel was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A kernel's or a model's job, as it is in the tables."""

    id: str
    kind: Literal["kernel", "model"]
    state: str
    turn: int = 0  # the order in which jobs were queued
    name: str = ""  # a model's, or that of a kernel's file
    key: str = ""
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    attempts: int = 0
    is_cancelling: bool = False
    stage: str | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) by stage; a model's by layers
    error: Problem | None = None
    request: Mapping[str, Any] = field(default_factory=dict)  # a kernel's; of a model n and device
    speedup: float | None = None
    layers: tuple[LayerState, ...] = ()

    @property
    def is_ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    @property
    def title(self) -> str:
        """Title of its page."""
        return f"{self.kind.title()} {self.name or self.id[:12]}"

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end."""
        if self.started is None or self.ended is None:
            return None
        return max(0.0, (self.ended - self.started).total_seconds())

    @property
    def fraction(self) -> tuple[int, int] | None:
        """(done, total) of the layers of a model, or of the stage of a kernel that reported last."""
        return self.progress.get("layers" if self.kind == "model" else self.stage or "")

    @property
    def watched(self) -> list[str]:
        """Ids under which its events are written."""
        return [self.id, *dict.fromkeys(layer.digest for layer in self.layers if layer.digest)]


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of a job."""

    id: int
    job: str
    time: datetime
    kind: str
    data: Mapping[str, Any]


def is_of_team(database: Database, job: str, team: str) -> bool:
    """Return whether a team has posted a kernel, also one whose job is forgotten, or a model."""
    with database.read() as connection:
        return teams.is_of(connection, job, team)


def find_job(database: Database, job: str, team: str | None = None) -> JobRow | None:
    """Return a model with all of its layers, or a kernel, or None."""
    of_kernel, of_model = _kernels(team), _models(team)
    with database.read() as connection:
        row = connection.execute(of_kernel.where(kernels.c.digest == job)).first()
        if row is not None:
            return _kernel(row)
        model = connection.execute(of_model.where(models.c.id == job)).first()
        return None if model is None else _model(model, _layers_of(connection, [job]).get(job, ()))


def list_jobs(
    database: Database, state: str | None, before: int | None, limit: int, team: str | None = None
) -> list[JobRow]:
    """Return what was posted, the last queued first: models, and kernels that are not only a layer."""
    posted = teams.is_posted(sa.true()) if team is None else postings.c.posted
    of_kernels = _kernels(team).where(posted).order_by(kernels.c.turn.desc()).limit(limit)
    of_models = _models(team).order_by(models.c.turn.desc()).limit(limit)
    if state is not None:
        of_kernels = of_kernels.where(_state_for(team) == state)
        of_models = of_models.where(_state_of_model() == state)
    if before is not None:
        of_kernels, of_models = of_kernels.where(kernels.c.turn < before), of_models.where(models.c.turn < before)
    with database.read() as connection:
        found = [_kernel(row) for row in connection.execute(of_kernels)]
        rows = connection.execute(of_models).all()
        parts = _layers_of(connection, [row.id for row in rows])
    found += [_model(row, parts.get(row.id, ())) for row in rows]
    return sorted(found, key=lambda job: -job.turn)[:limit]


def page_of_jobs(
    database: Database, state: str | None, before: int | None, limit: int, team: str | None = None
) -> tuple[list[JobRow], int | None]:
    """Return ``list_jobs``, and ``before`` of the next page; None on the last."""
    found = list_jobs(database, state, before, limit + 1, team)
    shown = found[:limit]
    return shown, shown[-1].turn if len(found) > limit else None


def events_after(database: Database, jobs: Sequence[str] | None, after: int, limit: int = 500) -> list[EventRow]:
    """Return the events of these jobs, or of all, that follow the one with the id ``after``."""
    chosen = sa.select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
    if jobs is not None:
        chosen = chosen.where(events.c.job.in_(jobs))
    with database.read() as connection:
        return [EventRow(row.id, row.job, row.time, row.kind, row.data) for row in connection.execute(chosen)]


def last_event(database: Database) -> int:
    """Return the id of the last event; 0 without any."""
    with database.read() as connection:
        return int(connection.execute(sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0))).scalar_one())


def figures(database: Database) -> QueueFigures:
    """Return the depth of the queue, and the age of its oldest job by this machine's clock."""
    since = sa.func.min(events.c.time)  # of the event that queued it last; the job may be older
    counted = sa.select(kernels.c.state, kernels.c.key, sa.func.count(), since)
    counted = counted.select_from(kernels.outerjoin(events, events.c.id == kernels.c.turn))
    counted = counted.where(kernels.c.state.in_(PENDING)).group_by(kernels.c.state, kernels.c.key)
    with database.read() as connection:
        rows = connection.execute(counted).all()
    number = {of: sum(count for state, _, count, _ in rows if state == of) for of in PENDING}
    now = datetime.now(UTC)
    ages = {
        key: max(0.0, (now - oldest).total_seconds()) for state, key, _, oldest in rows if state == "queued" and oldest
    }
    return QueueFigures(number["queued"], number["running"], max(ages.values(), default=0.0), ages)


def _state_for(team: str | None) -> sa.ColumnElement[str]:
    """Return a kernel's state; for a team that has cancelled what others want, it is cancelled."""
    return kernels.c.state if team is None else sa.case((postings.c.cancel, "cancelled"), else_=kernels.c.state)


def _kernels(team: str | None) -> sa.Select[Any]:
    name: sa.ColumnElement[Any] = postings.c.name
    if team is None:
        name = sa.select(sa.func.max(name)).where(postings.c.digest == kernels.c.digest).scalar_subquery()
    chosen = sa.select(kernels, _state_for(team).label("seen"), name.label("name"))
    if team is None:
        return chosen
    return chosen.join(postings, (postings.c.digest == kernels.c.digest) & (postings.c.team == team))


def _models(team: str | None) -> sa.Select[Any]:
    chosen = sa.select(models, _STOPPED, _state_of_model().label("state"))
    return chosen if team is None else chosen.where(models.c.team == team)


def _kernel(row: Any) -> JobRow:
    own = ("turn", "key", "created", "started", "ended", "attempts", "stage", "request", "speedup")
    return JobRow(
        id=row.digest,
        kind="kernel",
        state=row.seen,
        is_cancelling=row.cancel,
        name=row.name or "",
        progress=_progress(row.progress),
        error=_problem(row.error) if row.seen == row.state else describe(Cancelled()),
        **_columns(row, own),
    )


def _model(row: Any, found: Sequence[Any]) -> JobRow:
    states = tuple(_layer(layer) for layer in found)
    asked = [layer.state for layer in states if layer.skipped is None]
    done = sum(state in ENDED and state != "cancelled" for state in asked)
    return JobRow(
        id=row.id,
        kind="model",
        state=row.state,
        turn=row.turn,
        name=row.name,
        key=row.key,
        created=row.created,
        started=_since(row.created, min((layer.started for layer in found if layer.started), default=None)),
        ended=_ended(row, found) if row.state in ENDED else None,
        stage=next((layer.stage for layer in states if layer.state == "running"), None),
        progress={"layers": (done, len(asked))},
        error=_layers_failed(states, len(asked)) if row.state in ("failed", "partial") else None,
        request={"n": row.n or None, "device": {"name": row.device}},
        layers=states,
    )


def _ended(row: Any, found: Sequence[Any]) -> datetime | None:
    """Return when a model ended; a cancelled one ended then, though others may wait for its kernels."""
    if row.cancel:
        return cast(datetime, row.stopped)
    return _since(row.created, max((layer.ended for layer in found if layer.ended), default=None))


def _since(created: datetime, moment: datetime | None) -> datetime | None:
    """Return ``moment``, at least ``created``: kernels may have been tuned before the model was posted."""
    return None if moment is None else max(created, moment)


def _layer(row: Any) -> LayerState:
    unread = "failed" if row.skipped is None else SKIPPED
    own = ("name", "n", "digest", "stage", "m", "k", "nnz", "speedup", "estimated_micros", "skipped")
    return LayerState(
        state=unread if row.bad is not None or row.state is None else row.state,
        progress=_progress(row.progress or {}),
        error=_problem(row.bad or row.error),
        **_columns(row, own),
    )


def _columns(row: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _layers_of(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[Any]]:
    joined = layers.outerjoin(kernels, kernels.c.digest == layers.c.digest)
    of_layer = (layers.c.model, layers.c.name, layers.c.digest, layers.c.m, layers.c.k, layers.c.nnz)
    of_kernel = (kernels.c.state, kernels.c.stage, kernels.c.progress, kernels.c.error, kernels.c.speedup)
    columns = (
        *of_layer,
        _COLUMNS,
        layers.c.skipped,
        layers.c.error.label("bad"),
        *of_kernel,
        kernels.c.started,
        kernels.c.ended,
    )
    chosen = sa.select(*columns, _ESTIMATED).select_from(joined).where(layers.c.model.in_(ids))
    found: dict[str, list[Any]] = {}
    for row in connection.execute(chosen.order_by(layers.c.model, layers.c.position)):
        found.setdefault(row.model, []).append(row)
    return found


def _layers_failed(states: Sequence[LayerState], asked: int) -> Problem:
    failed = [layer for layer in states if layer.state == "failed"]
    named = "; ".join(
        f"{layer.name}: {layer.error.detail if layer.error else 'lost'}" for layer in failed[:NAMED_LAYERS]
    )
    more = f"; and {len(failed) - NAMED_LAYERS} more" if len(failed) > NAMED_LAYERS else ""
    return describe(LayersFailed(f"{len(failed)} of {asked} layers have no kernel: {named}{more}"))


def _progress(content: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    return {name: (counts[0], counts[1]) for name, counts in content.items()}


def _problem(content: Mapping[str, Any] | None) -> Problem | None:
    return None if content is None else Problem(**content)
