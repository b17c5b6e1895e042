"""API keys, for services that other machines can reach. Only a key's sha256 is stored.

A key has 256 random bits, so that its hash needs no salt and no slow function. A file (LOSPMM_API_KEYS) has a name,
a hash and terms on each line; ``lospmm keys`` manages those of the database.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

import sqlalchemy as sa
from fastapi import HTTPException, Request
from fastapi.openapi.models import HTTPBase
from fastapi.security.base import SecurityBase
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from lospmm.errors import BadRequest, BadSettings
from lospmm.settings import settings
from lospmm_server.database import Database
from lospmm_server.faults import DatabaseFault
from lospmm_server.guesses import Guesses
from lospmm_server.tables import keys

#: Prefix of keys, by which a key in a log or a repository is recognised.
PREFIX = "lospmm_"

#: Seconds for which a revoked key may still be accepted.
REFRESH_SECONDS = 3.0

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_LINE = re.compile(rf"({_NAME.pattern})[ \t]+([0-9a-f]{{64}})((?:[ \t]+\S+)*)")

#: A browser asks its reader for the key where a page is refused; programs send it as a bearer token.
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="lospmm", Basic realm="lospmm"'}


#: What a key is for: to see, to post and cancel, and to see the figures of all teams.
Scope = Literal["read", "tune", "admin"]


def _zoned(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Terms(BaseModel):
    """What a key's holder may do, as it is typed: ``team=vision scopes=read,tune expires=2030-01-31``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    team: Annotated[str, StringConstraints(pattern=rf"^{_NAME.pattern}$")] = ""  # empty: it sees every team's things
    shared: bool = False  # it sees every team's things too, and posts for its own
    scopes: Annotated[frozenset[Scope], BeforeValidator(lambda typed: typed.split(","))] = frozenset(get_args(Scope))
    weight: Annotated[int, Field(ge=1, le=100)] = 1  # turns at the workers for one of another key's
    expires: Annotated[datetime, AfterValidator(_zoned)] | None = None  # UTC where it does not say

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires <= _now()

    @classmethod
    def read(cls, typed: Sequence[str]) -> "Terms":
        """Return the terms. Raises BadRequest, whose message has nothing typed: it may be a key."""
        given = dict((term if "=" in term else f"{term}=true").split("=", 1) for term in typed)
        try:
            if len(given) < len(typed):
                raise BadRequest("a term is given twice")
            return cls.model_validate(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            known = wrong["loc"][0] in cls.model_fields
            why = f"{wrong['loc'][0]}: {wrong['msg']}" if known else f"terms are {', '.join(cls.model_fields)}"
            raise BadRequest(why) from None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the key; by default, of a service without keys, everybody on this machine."""

    name: str = ""
    sha256: str = ""
    terms: Terms = field(default_factory=Terms)

    @property
    def team(self) -> str:
        """The team that posts what this caller posts; empty: none."""
        return self.terms.team

    @property
    def sees(self) -> str | None:
        """The team whose jobs, models and kernels alone there are for this caller; None: those of all."""
        return None if self.terms.shared else self.terms.team or None


NOBODY = Caller()


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the database, without its text."""

    name: str
    created: datetime
    is_valid: bool
    terms: str


def add(database: Database, name: str, terms: Sequence[str] = ()) -> str:
    """Create a key called ``name`` and return it; it is shown only once. Raises BadRequest, DatabaseFault."""
    _check_name(name)
    if Terms.read(terms).has_expired:
        raise BadRequest("expires: the time is over; give a later one, as expires=2099-01-31")
    key = PREFIX + secrets.token_urlsafe(32)
    with database.write() as connection:
        if connection.execute(_valid().where(keys.c.name == name)).first() is not None:
            raise BadRequest(f"there is a key {name!r} already; revoke it first, or take another name")
        row = {"sha256": digest_of(key), "name": name, "created": datetime.now(UTC), "terms": " ".join(terms)}
        connection.execute(sa.insert(keys).values(**row))
    return key


def revoke(database: Database, name: str) -> None:
    """Revoke a key. Raises BadRequest if there is no valid key of that name, DatabaseFault."""
    with database.write() as connection:
        valid = (keys.c.name == name) & keys.c.revoked.is_(None)
        changed = connection.execute(sa.update(keys).where(valid).values(revoked=datetime.now(UTC)))
        if changed.rowcount == 0:
            raise BadRequest(f"there is no valid key {name[:80]!r}; `lospmm keys ls` lists them")


def listed(database: Database) -> list[Key]:
    """Return every key, revoked ones too, the oldest first. Raises DatabaseFault."""
    with database.read() as connection:
        rows = connection.execute(sa.select(keys).order_by(keys.c.created))
        return [
            Key(row.name, row.created, row.revoked is None and not _terms(row).has_expired, row.terms) for row in rows
        ]


def digest_of(key: str) -> str:
    """Return the sha256 that is stored of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_file(path: Path) -> dict[str, Caller]:
    """Return the keys of a file by their hashes; names may repeat. Raises BadSettings."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"LOSPMM_API_KEYS: {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if (match := _LINE.fullmatch(text)) is None:
            raise BadSettings(f"LOSPMM_API_KEYS: {path}, line {number}: a name and the sha256 of its key are expected")
        try:
            found[match[2]] = Caller(match[1], match[2], Terms.read(match[3].split()))
        except BadRequest as error:
            raise BadSettings(f"LOSPMM_API_KEYS: {path}, line {number}: {error}") from None
    return found


class Keyring:
    """The valid keys of file and database, read again every REFRESH_SECONDS; thread-safe. Wrong ones are counted."""

    def __init__(self, database: Database) -> None:
        self.guesses = Guesses()
        self._database = database
        self._lock = threading.Lock()
        self.callers: Mapping[str, Caller] = {}  # by the hash of the key
        self._of_database: Mapping[str, Caller] = {}
        self._read: float | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the keys must be read again."""
        return self._read is None or time.monotonic() - self._read > REFRESH_SECONDS

    def refresh(self) -> bool:
        """Read the keys and return whether there are any. Raises BadSettings, or DatabaseFault the first time."""
        with self._lock:
            if not self.is_stale:  # another request was first
                return bool(self.callers)
            path = settings().api_keys
            of_file = {} if path is None else read_file(path)
            try:
                with self._database.read() as connection:
                    rows = connection.execute(_valid()).all()
                self._of_database = {row.sha256: Caller(row.name, row.sha256, _terms(row)) for row in rows}
            except DatabaseFault:
                if self._read is None:
                    raise  # later, its last valid keys stay valid until it is back
            found = {**self._of_database, **of_file}
            self.callers = {known: caller for known, caller in found.items() if not caller.terms.has_expired}
            self._read = time.monotonic()
            return bool(self.callers)

    def caller_of(self, key: str) -> Caller | None:
        """Return who has a key, or None, in constant time."""
        digest = digest_of(key)
        matching = [caller for known, caller in self.callers.items() if hmac.compare_digest(known, digest)]
        return matching[0] if matching else None

    def knows(self, caller: Caller) -> bool:
        """Return whether a caller's key is still valid, on the same terms."""
        return self.callers.get(caller.sha256) == caller


def key_of(request: Request) -> str | None:
    """Return the key of the header Authorization: a bearer token, or the password of a browser."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
    return None


def check_scope(request: Request, caller: Caller) -> None:
    """Raise HTTPException 403 if the caller's key is not for such a request."""
    scope: Scope = "admin" if request.url.path == "/metrics" else "read" if request.method == "GET" else "tune"
    if scope not in caller.terms.scopes:
        raise HTTPException(403, f"this key lacks the scope {scope!r}, which this request needs")


class KeyScheme(SecurityBase):
    """A way to send a key, for the OpenAPI; ``key_of`` reads them all."""

    def __init__(self, scheme: str, description: str) -> None:
        self.model, self.scheme_name = HTTPBase(scheme=scheme, description=description), scheme

    async def __call__(self) -> None:
        """Check nothing: pages have keys too, and no OpenAPI."""


SCHEMES = (
    KeyScheme("bearer", "An API key, as `lospmm keys add` prints it."),
    KeyScheme("basic", "An API key as the password of any user, for browsers."),
)


def refused() -> HTTPException:
    """Return the answer to a request without a valid key."""
    return HTTPException(401, "send a valid API key, as in -H 'Authorization: Bearer KEY'", _CHALLENGE)


def _valid() -> sa.Select[tuple[str, str, datetime, datetime | None, str]]:
    return sa.select(keys).where(keys.c.revoked.is_(None))


def _terms(row: sa.Row[tuple[str, str, datetime, datetime | None, str]]) -> Terms:
    return Terms.read(row.terms.split())


def _now() -> datetime:
    return datetime.now(UTC)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(f"key name {name[:80]!r}: 1 to 80 letters, digits, dots, dashes and underscores")
