"""Logs of the service on stderr: a JSON object a line, or text on a terminal.

Every line has ``time`` (UTC), ``level``, ``event`` and ``logger``; lines about a request or a job have ``request_id``
or ``job_id`` too. Libraries log through the standard library as always and their lines look the same.
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import structlog

Event = MutableMapping[str, Any]

#: Loggers of libraries that say too much at INFO: a line for each request of the client, each migration.
QUIET = ("alembic", "httpx2", "httpcore", "sqlalchemy")


def configure(stream: TextIO | None = None, *, level: int = logging.INFO) -> None:
    """Send everything that this process logs to ``stream`` (stderr), replacing earlier configurations."""
    target = sys.stderr if stream is None else stream
    shared = _shared()
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_written(target)],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a logger of a module would keep the stream of an earlier ``configure``
    )


@contextmanager
def about_job(job_id: str) -> Iterator[None]:
    """Mark the log lines of the block as about this job. A thread started in the block needs its own mark."""
    with structlog.contextvars.bound_contextvars(job_id=job_id):
        yield


@contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Mark the log lines of the block, and of its handlers' threads, as about this request."""
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        yield


def _shared() -> Sequence[structlog.typing.Processor]:
    """Return the processors that every line passes."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        _without_foreign,
    ]


def _written(target: TextIO) -> Sequence[structlog.typing.Processor]:
    if target.isatty():
        plain = structlog.dev.plain_traceback  # the default shows the values of variables, keys among them
        return [_printable, structlog.dev.ConsoleRenderer(timestamp_key="time", exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=True)]


def _without_foreign(_logger: object, _method: str, event: Event) -> Event:
    """Drop uvicorn's second copy of a line, which has terminal colours, and Ray's second time."""
    for name in ("color_message", "_ray_timestamp_ns"):
        event.pop(name, None)
    return event


def _printable(_logger: object, _method: str, event: Event) -> Event:
    """Escape control characters, so that a user's text cannot move the cursor of a terminal."""
    return {key: _shown(value) if isinstance(value, str) else value for key, value in event.items()}


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
