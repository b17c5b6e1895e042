"""``lospmm serve`` and ``worker``, which run until SIGTERM or Ctrl-C, and ``lospmm keys``."""

import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any, TypeAlias

from lospmm.artifact import kept
from lospmm.errors import BadRequest
from lospmm.gpu.detect import own_gpu
from lospmm.settings import be_a_service, settings, unknown_variables
from lospmm.toolchain.discover import find_toolkit
from lospmm_server import keys, logs, memory
from lospmm_server.database import Database, open_database
from lospmm_server.http_server import Server
from lospmm_server.service import Service
from lospmm_server.tuning import tune_here
from lospmm_server.uploads import check_worker_gpu
from lospmm_server.worker import Worker

#: Seconds after which a client that does not read its answer is given up.
UNREAD_SECONDS = 60

#: Seconds between two checks of a worker whether its parent still runs.
PARENT_SECONDS = 0.5

#: The most characters of a worker's name.
NAME_CHARACTERS = 60

_log = logging.getLogger(__name__)


#: A family of addresses and what its sockets are bound to.
Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]


def serve(host: str, port: int, workers: int) -> None:
    """Serve until SIGTERM or SIGINT, which end the process and its workers in seconds.

    Raises BadSettings for workers with an unknown GPU and for a toolkit that is none, BadRequest for an address that
    cannot be listened on, or that other machines can reach while there is no API key, DatabaseFault, and ServiceFault
    if the server cannot start, as without threads.
    """
    be_a_service()
    _allow_open_files()
    check_worker_gpu(settings().worker_gpu)
    _check_toolkit()
    addresses = _addresses(host, port)
    database = _migrated()
    keyring = _keyring(addresses, database)
    listeners = listen(host, port)
    logs.configure()
    memory.return_large_blocks()
    # At the end uvicorn raises the signal again. It must then end the process: Python would first wait for threads, and
    # one may be in the middle of a long file.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    service = Service(database, kept.open_store(), keyring=keyring, workers=workers)
    Server(service, partial(_announce, listeners)).run(sockets=listeners)


def _announce(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        print(f"lospmm serves {_url(listener)}, described at {_url(listener)}/docs", file=sys.stderr, flush=True)


def _allow_open_files() -> None:
    """Raise the limit on open files to its maximum: each connection and each larger upload is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a system may grant less than it claims
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def work(name: str, parent: int | None, ray: str | None = None) -> None:
    """Tune jobs of the queue until SIGTERM, SIGINT, or the end of the process ``parent``.

    One after the other here, or as many as there are slots on the Ray cluster at the address ``ray``. The end takes
    seconds: running jobs are given back. Raises DatabaseFault if there is no database at the start, BadRequest if
    there is no such cluster, or for an invalid name, and BadSettings for a toolkit that is none.
    """
    _check_name(name)
    _check_toolkit()
    logs.configure()
    if parent is None:  # else the server has printed it
        for line in unknown_variables():
            _log.warning("%s", line)
    on_cluster = None if ray is None else _connected(ray)  # Ray installs its own handler of SIGTERM
    stop, told = threading.Event(), []

    def leave(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    if parent is not None:
        threading.Thread(target=_watch_parent, args=(parent, stop), daemon=True).start()
    database, store = _migrated(), kept.open_store()
    if on_cluster is None:
        Worker(database, store, tune_here(store), name=name, gpu=own_gpu() or "").run(stop)
    else:
        on_cluster(database, store, name, stop)
    # Not by returning: Python would wait for threads, and a stage that cannot be interrupted may take minutes.
    os._exit(128 + told[0] if told else 0)


def add_key(name: str, terms: Sequence[str]) -> str:
    """Make an API key in the database and return it. Raises BadRequest, DatabaseFault."""
    return keys.add(_migrated(), name, terms)


def list_keys() -> list[keys.Key]:
    """Return the API keys of the database, the oldest first. Raises DatabaseFault."""
    return keys.listed(_migrated())


def revoke_key(name: str) -> None:
    """Revoke an API key of the database. Raises BadRequest, DatabaseFault."""
    keys.revoke(_migrated(), name)


def _migrated() -> Database:
    database = open_database()
    database.migrate()
    return database


def _check_name(name: str) -> None:
    """Raise BadRequest for a name that tables cannot hold, with the suffix of a cluster's slot."""
    if len(name) > NAME_CHARACTERS or not name.isprintable():
        raise BadRequest(f"--name {name[:80]!r}: at most {NAME_CHARACTERS} printable characters")


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on every address of ``host``. Raises BadRequest."""
    found = _addresses(host, port)
    try:
        listeners = [socket.create_server(address[:2], family=family) for family, address in found]
        for listener in listeners:
            # Connections inherit it. Else the body of an answer, which is written after its head, waits 40 ms for the
            # client's kernel to confirm the head; asyncio sees to that only for sockets that name their protocol.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # They inherit this too. An answer that its client does not take would keep a descriptor for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
        return listeners
    except OSError as error:  # the error's text repeats the address
        reason = os.strerror(error.errno) if error.errno else error
        raise BadRequest(f"{host} port {port}: {reason}; choose another with --port") from None


def _check_toolkit() -> None:
    """Check LOSPMM_TOOLKIT at the start instead of at the first job. Raises BadSettings."""
    if settings().toolkit is not None:
        find_toolkit()


def _addresses(host: str, port: int) -> list[Address]:
    """Return the addresses of a host. Raises BadRequest."""
    if not 0 <= port < 2**16:
        raise BadRequest(f"port {port}: expected 0 to {2**16 - 1}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"host {host!r}: {getattr(error, 'strerror', None) or error}") from None
    return [(family, address) for family, *_, address in found]


def _keyring(addresses: Sequence[Address], database: Database) -> keys.Keyring | None:
    """Return the API keys, or None if only this machine can reach the service.

    Raises BadRequest if others can and there is no key, and BadSettings for a bad file of keys.
    """
    others = [address[0] for _, address in addresses if not ip_address(address[0].partition("%")[0]).is_loopback]
    if not others:
        if (path := settings().api_keys) is not None:
            keys.read_file(path)  # report a bad file even though no keys are needed
        return None
    keyring = keys.Keyring(database)
    if not keyring.refresh():
        raise BadRequest(
            f"{others[0]} is an address that other machines can reach, and there is no API key: make one with "
            "`lospmm keys add NAME`, or name a file of keys in LOSPMM_API_KEYS; or use 127.0.0.1"
        )
    return keyring


def _connected(ray: str) -> Callable[..., None]:
    """Connect to a Ray cluster; return ``ray_worker.work``. Raises BadRequest."""
    try:
        from lospmm_server import ray_cluster, ray_worker  # an extra, and a second to import
    except ModuleNotFoundError:
        raise BadRequest("--ray needs Ray: pip install 'lospmm[ray]'") from None
    ray_cluster.connect(ray)
    return ray_worker.work


def _watch_parent(parent: int, stop: threading.Event) -> None:
    while os.getppid() == parent:
        if stop.wait(PARENT_SECONDS):
            return
    stop.set()


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
