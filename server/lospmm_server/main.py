"""``lospmm serve``, which runs until SIGTERM or Ctrl-C, and ``lospmm keys``."""

import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeAlias

from lospmm.artifact import kept
from lospmm.errors import BadRequest
from lospmm.settings import be_a_service, settings
from lospmm.toolchain.discover import check_toolkit
from lospmm_server import keys, logs, memory
from lospmm_server.database import Database, migrated
from lospmm_server.http_server import Server
from lospmm_server.service import Service
from lospmm_server.uploads import check_worker_gpu

#: Seconds after which a client that does not read its answer is given up.
UNREAD_SECONDS = 60

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
    check_toolkit()
    addresses = _addresses(host, port)
    database = migrated()
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


def add_key(name: str, terms: Sequence[str]) -> str:
    """Make an API key in the database and return it. Raises BadRequest, DatabaseFault."""
    return keys.add(migrated(), name, terms)


def list_keys() -> list[keys.Key]:
    """Return the API keys of the database, the oldest first. Raises DatabaseFault."""
    return keys.listed(migrated())


def revoke_key(name: str) -> None:
    """Revoke an API key of the database. Raises BadRequest, DatabaseFault."""
    keys.revoke(migrated(), name)


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


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
