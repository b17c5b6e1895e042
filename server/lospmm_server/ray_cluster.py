"""A Ray cluster (docs.ray.io): its nodes, and who does work on one of them, as an ``Executor``.

A task is run once: what becomes of work whose process, node or network is gone, the queue decides, not Ray.
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

#: How long an address may take to answer, in seconds. Ray itself would try for minutes.
ANSWER_SECONDS = 5.0

#: Ray's reasons go on with advice of many lines.
REASON_CHARACTERS = 200

#: What a client of HTTP/2 says first, which Ray's gRPC is, and the kind of frame that every server answers with.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _KIND, _SETTINGS = 9, 3, 4

Given = ParamSpec("Given")
Found = TypeVar("Found")


class TaskLost(Exception):
    """A task that Ray could not bring to its end; ``has_begun`` says whether it may have been its own fault."""

    def __init__(self, reason: str, *, has_begun: bool) -> None:
        super().__init__(reason)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    host: str
    cores: float
    gpus: int

    @property
    def name(self) -> str:
        """For people: there may be several on one host."""
        return f"{self.host}/{self.id[:8]}"


@dataclass(frozen=True, slots=True)
class Share:
    """What of a node a task takes; Ray counts that, and shows the task its GPU alone."""

    node: str
    cores: float = 0.0
    gpus: float = 0.0


class RayExecutor(Executor):
    """Runs functions as tasks on a node, each in a process of its own.

    To cancel a future kills that process. One whose task is lost raises TaskLost, all others what the function raises.
    """

    def __init__(self, share: Share) -> None:
        where = NodeAffinitySchedulingStrategy(share.node, soft=False)
        self._options = {"num_cpus": share.cores, "num_gpus": share.gpus, "scheduling_strategy": where}

    def submit(self, fn: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> "Future[Found]":
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
    """What the function raised, without Ray's report around it, or that the task is lost."""
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
    """A process that has used one GPU cannot use another, and what a task leaves behind ends with its process."""
    return ray.remote(max_calls=1, max_retries=0)(fn)


def connect(address: str) -> None:
    """Make this process a driver of the cluster at HOST:PORT, or of this machine's ("auto"). Raises BadRequest."""
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS]
        raise BadRequest(f"--ray {address}: {reason}") from None
    logging.setLogRecordFactory(logging.LogRecord)  # Ray's adds a field to every line of the log


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
        raise BadRequest(f"--ray {address}: something else than a Ray cluster answers there")


def living_nodes() -> dict[str, Node]:
    """The nodes that are there, by id."""
    described: Any = ray.nodes  # it has no types
    return {node["NodeID"]: _node(node) for node in described() if node["Alive"]}


def _node(described: Mapping[str, Any]) -> Node:
    resources = described["Resources"]
    cores, gpus = float(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    return Node(described["NodeID"], described["NodeManagerHostname"], cores, gpus)


def own_node() -> str:
    """The id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())
