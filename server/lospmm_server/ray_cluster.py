"""A Ray cluster (docs.ray.io): its nodes, and an ``Executor`` that runs tasks on one of them.

A task is run once: if its process, node or network is lost, the queue decides what to do, not Ray.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lospmm.errors import BadRequest

#: Seconds that an address may take to answer. Ray itself would try for minutes.
ANSWER_SECONDS = 5.0

#: The most characters of Ray's reasons, which many lines of advice follow.
REASON_CHARACTERS = 200

#: The first bytes of an HTTP/2 client, as Ray's gRPC is one, and the type of frame that every server answers with.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _KIND, _SETTINGS = 9, 3, 4

Given = ParamSpec("Given")
Found = TypeVar("Found")


class TaskLost(Exception):
    """A task that Ray could not finish; ``has_begun``: the task itself may be at fault."""

    def __init__(self, reason: str, *, has_begun: bool) -> None:
        super().__init__(reason)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str
    host: str
    cores: float
    gpus: int

    @property
    def name(self) -> str:
        """Name for people: there may be several nodes on one host."""
        return f"{self.host}/{self.id[:8]}"


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of a node that a task takes; Ray enforces them, and shows the task its GPU alone."""

    node: str
    cores: float = 0.0
    gpus: float = 0.0


class RayExecutor(Executor):
    """Runs functions as tasks on a node, each in a process of its own.

    Cancelling a future kills that process. A lost task raises TaskLost, all others what the function raises.
    """

    def __init__(self, share: Share) -> None:
        where = NodeAffinitySchedulingStrategy(share.node, soft=False)
        self._options = {"num_cpus": share.cores, "num_gpus": share.gpus, "scheduling_strategy": where}

    def submit(self, fn: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> "Future[Found]":
        """Run a function as a task."""
        return _TaskFuture(_remote(fn).options(**self._options).remote(*args, **kwargs))


class _TaskFuture(Future[Found]):
    def __init__(self, ref: Any) -> None:
        super().__init__()
        self._ref = ref
        ref.future().add_done_callback(self._end)

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            ray.cancel(self._ref, force=True)
        return is_cancelled

    def _end(self, ended: "Future[Found]") -> None:
        if not self.set_running_or_notify_cancel():
            return
        error = ended.exception()
        if error is None:
            self.set_result(ended.result())
        else:
            self.set_exception(_raised(error))


def _raised(error: BaseException) -> BaseException:
    """Return what the function raised, without Ray's report around it, or TaskLost."""
    match error:
        case RayTaskError():
            return error.cause or error
        case RayError():
            reason = " ".join(str(error).split())[:REASON_CHARACTERS]
            return TaskLost(
                f"{type(error).__name__}: {reason}", has_begun=not isinstance(error, TaskUnschedulableError)
            )
        case _:
            return error


@cache
def _remote(fn: Callable[..., Any]) -> Any:
    """Return a remote function that runs each call in a new process, as a process cannot change its GPU."""
    return ray.remote(max_calls=1, max_retries=0)(fn)


def connect(address: str) -> None:
    """Connect this process to the cluster at HOST:PORT, or to this machine's ("auto"). Raises BadRequest."""
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS]
        raise BadRequest(f"--ray {address}: {reason}") from None
    logging.setLogRecordFactory(logging.LogRecord)  # Ray's factory adds a field to every log line


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise BadRequest(f"--ray {address}: expected HOST:PORT, as `ray start --head` prints it, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as stream:
            stream.sendall(_PREFACE)
            answer = stream.recv(_FRAME_BYTES)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(f"--ray {address}: no cluster answers ({reason}); `ray start --head` starts one") from None
    if len(answer) < _FRAME_BYTES or answer[_KIND] != _SETTINGS:
        raise BadRequest(f"--ray {address}: something other than a Ray cluster answers there")


def living_nodes() -> dict[str, Node]:
    """Return the nodes that are alive, by id."""
    described: Any = ray.nodes  # untyped
    return {node["NodeID"]: _node(node) for node in described() if node["Alive"]}


def _node(described: Mapping[str, Any]) -> Node:
    resources = described["Resources"]
    cores, gpus = float(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    return Node(described["NodeID"], described["NodeManagerHostname"], cores, gpus)


def own_node() -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())
