"""Teams and what they have posted. A kernel is one job for all teams, and each knows only of those that it posted.

Keys without a team post for the team ``""``, and see everything.
"""

import sqlalchemy as sa

from lospmm_server.tables import kernels, layers, models, postings


def is_of(connection: sa.Connection, job: str, team: str | None) -> bool:
    """Return whether a team has posted a kernel, perhaps as a layer, or a model; None: every team."""
    if team is None:
        return True
    posted = sa.select(postings.c.team).where((postings.c.digest == job) & (postings.c.team == team))
    model = sa.select(models.c.team).where((models.c.id == job) & (models.c.team == team))
    return connection.execute(posted.union_all(model).limit(1)).first() is not None


def wants(connection: sa.Connection, digest: str, team: str) -> bool:
    """Return whether a team has posted a kernel by itself, and has not cancelled it."""
    mine = _of(digest, team) & postings.c.posted & ~postings.c.cancel
    return connection.execute(sa.select(postings.c.team).where(mine)).first() is not None


def post(connection: sa.Connection, digest: str, team: str, *, name: str | None, is_cancelled: bool) -> None:
    """Record that a team wants a kernel, by ``name`` or as a layer (None); of a cancelled one, that others do not."""
    if is_cancelled:
        _cancel(connection, postings.c.digest == digest)
    if name is None and wants(connection, digest, team):
        return
    values = {"posted": name is not None, "name": name or "", "cancel": False}
    connection.execute(sa.delete(postings).where(_of(digest, team)))
    connection.execute(sa.insert(postings).values(team=team, digest=digest, **values))


def leave(connection: sa.Connection, digest: str, team: str) -> bool:
    """Cancel a kernel for one team, if others want it. Return whether they do."""
    others = (postings.c.digest == digest) & (postings.c.team != team) & ~postings.c.cancel
    if connection.execute(sa.select(postings.c.team).where(others).limit(1)).first() is None:
        return False
    _cancel(connection, _of(digest, team))
    return True


def only_of(model: str, team: str) -> sa.ColumnElement[bool]:
    """Return the condition that a kernel is of this model of a team, and of nothing else that the team wants."""
    own = sa.select(layers.c.digest).where((layers.c.model == model) & layers.c.digest.is_not(None))
    of_models = sa.select(layers.c.digest).join(models, models.c.id == layers.c.model)
    others = (models.c.id != model) & (models.c.team == team) & ~models.c.cancel & layers.c.digest.is_not(None)
    digest = kernels.c.digest
    return digest.in_(own) & digest.not_in(of_models.where(others)) & ~is_posted(postings.c.team == team)


def is_posted(by: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return the condition that a kernel was posted by itself, by such teams, and not cancelled."""
    return sa.exists().where((postings.c.digest == kernels.c.digest) & postings.c.posted & ~postings.c.cancel & by)


def _of(digest: str, team: str) -> sa.ColumnElement[bool]:
    return (postings.c.digest == digest) & (postings.c.team == team)


def _cancel(connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
    connection.execute(sa.update(postings).where(which).values(cancel=True))
