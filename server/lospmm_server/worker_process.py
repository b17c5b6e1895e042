"""``lospmm worker``, which runs until SIGTERM or Ctrl-C. It imports no routes, and ``main.py`` nothing that tunes."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from lospmm.artifact import kept
from lospmm.errors import BadRequest
from lospmm.gpu.detect import own_gpu
from lospmm.settings import unknown_variables
from lospmm.toolchain.discover import check_toolkit
from lospmm_server import logs
from lospmm_server.database import migrated
from lospmm_server.tuning import tune_here
from lospmm_server.worker import Worker

#: Seconds between two checks of a worker whether its parent still runs.
PARENT_SECONDS = 0.5

#: The most characters of a worker's name.
NAME_CHARACTERS = 60

_log = logging.getLogger(__name__)


def work(name: str, parent: int | None, ray: str | None = None) -> None:
    """Tune jobs of the queue until SIGTERM, SIGINT, or the end of the process ``parent``.

    One after the other here, or as many as there are slots on the Ray cluster at the address ``ray``. The end takes
    seconds: running jobs are given back. Raises DatabaseFault if there is no database at the start, BadRequest if
    there is no such cluster, or for an invalid name, and BadSettings for a toolkit that is none.
    """
    _check_name(name)
    check_toolkit()
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
    database, store = migrated(), kept.open_store()
    if on_cluster is None:
        Worker(database, store, tune_here(store), name=name, gpu=own_gpu() or "").run(stop)
    else:
        on_cluster(database, store, name, stop)
    # Not by returning: Python would wait for threads, and a stage that cannot be interrupted may take minutes.
    os._exit(128 + told[0] if told else 0)


def _check_name(name: str) -> None:
    """Raise BadRequest for a name that tables cannot hold, with the suffix of a cluster's slot."""
    if len(name) > NAME_CHARACTERS or not name.isprintable():
        raise BadRequest(f"--name {name[:80]!r}: at most {NAME_CHARACTERS} printable characters")


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
