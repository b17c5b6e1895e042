"""``lospmm worker --ray``: one process that runs a job in every slot of a Ray cluster.

A slot is a GPU with its share of the node's cores, or a few cores of a node without GPUs. Each has a ``Worker`` of
its own, in a thread of this process, whose jobs are tasks on that node: matrices are sent there, kernels come back,
and the nodes need no shared file system. The queue and its leases know nothing of Ray.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lospmm.artifact import artifact, kept
from lospmm.artifact.artifact import Artifact
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning.request import Request
from lospmm.version import __version__
from lospmm_server.database import Database
from lospmm_server.leases import GRACE_SECONDS, new_name
from lospmm_server.queue import Claim
from lospmm_server.queued_request import from_json as request_from_json
from lospmm_server.ray_cluster import Node, RayExecutor, Share, TaskLost, living_nodes, own_node
from lospmm_server.ray_tasks import Board, Seen, look, tune_there
from lospmm_server.tuning import Died, Tune
from lospmm_server.worker import Worker

#: Cores of a slot without a GPU: tuning uses more only while it compiles.
SLOT_CORES = 4

#: Seconds between two checks of the nodes, and of a task: its end, its cancellation and its progress.
LOOK_SECONDS = 2.0
TICK_SECONDS = 0.2

#: Seconds after which an unusable node is tried again.
RETRY_SECONDS = 60.0

#: Seconds that the board's answer may take, and the share of a GPU that ``look`` takes: Ray allots hundredths.
BOARD_SECONDS = 1.0
LOOKING_GPUS = 0.01

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one job."""

    node: Node
    number: int
    gpu: str  # its name in the device table; empty: none
    cores: float

    @property
    def name(self) -> str:
        """Name that no other slot of the cluster has."""
        return f"{self.node.id[:8]}.{self.number}"


@dataclass(frozen=True, slots=True)
class Hand:
    """The state of a slot. Its worker ends once ``stop`` is set."""

    slot: Slot
    stop: threading.Event = field(default_factory=threading.Event)
    busy: threading.Event = field(default_factory=threading.Event)  # with a job
    lost: threading.Event = field(default_factory=threading.Event)  # a task, and the node perhaps too


def slots_of(node: Node, gpu: str) -> tuple[Slot, ...]:
    """Return the slots of a node; ``gpu`` names its GPUs in the device table; empty: none known."""
    count = node.gpus if gpu else int(min(1.0, node.cores)) * max(1, int(node.cores) // SLOT_CORES)
    return tuple(Slot(node, number, gpu, node.cores / count) for number in range(count))


def tune_in(hand: Hand, store: Store, board: Any) -> Tune:
    """Return a function that tunes jobs in the slot of ``hand``, which is stopped when a task is lost."""

    def tune(claim: Claim, progress: Progress, cancel: threading.Event) -> Artifact:
        hand.busy.set()
        try:
            files = _files(hand.slot, board, request_from_json(claim.request, store), claim.digest, progress, cancel)
        except TaskLost as lost:
            hand.lost.set()
            hand.stop.set()
            _log.warning("a task on the node %s is lost: %s", hand.slot.node.name, lost)
            raise (Died(str(lost)) if lost.has_begun else CancelledError) from None
        finally:
            hand.busy.clear()
        finished = artifact.from_files(files, f"the kernel from the node {hand.slot.node.name}")
        store.put(kept.KERNELS, claim.digest, finished.files)
        return kept.find(claim.digest, store) or finished

    return tune


def _files(
    slot: Slot, board: Any, request: Request, job: str, progress: Progress, cancel: threading.Event
) -> dict[str, bytes]:
    """Return or raise the result of ``tune_there``; on ``cancel``, kill its process: CancelledError."""
    on_gpu = "gpu" in (request.options.measure, request.options.verify)
    executor = RayExecutor(Share(slot.node.id, slot.cores, 1.0 if on_gpu else 0.0))
    future = executor.submit(tune_there, request, job, slot.name, max(1, int(slot.cores)), board)
    try:
        while not wait([future], TICK_SECONDS).done:
            if cancel.is_set():
                raise CancelledError
            _show(board, slot.name, job, progress)
        return future.result()
    finally:
        future.cancel()


def _show(board: Any, slot: str, job: str, progress: Progress) -> None:
    try:
        of_job, counts = ray.get(board.read.remote(slot), timeout=BOARD_SECONDS)
    except RayError:  # the job goes on even if its progress cannot be shown
        return
    for stage, (done, total) in counts.items() if of_job == job else ():
        progress(stage, done, total)


class ClusterWorkers:
    """A worker for every slot of the cluster, as nodes come and go; a node must answer before it gets one."""

    def __init__(self, hire: Callable[[Hand], Worker]) -> None:
        self._hire = hire
        self._looks: dict[str, Future[Seen]] = {}  # in progress, by node
        self._slots: dict[str, tuple[Slot, ...]] = {}
        self._hands: dict[str, tuple[Hand, threading.Thread]] = {}  # by slot
        self._retried = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set; running jobs are then given back within GRACE_SECONDS."""
        while not stop.is_set():
            self._look({id: node for id, node in living_nodes().items() if node.cores >= 1 or node.gpus})
            stop.wait(TICK_SECONDS if self._looks else LOOK_SECONDS)
        for hand, _ in self._hands.values():
            hand.stop.set()
        deadline = time.monotonic() + GRACE_SECONDS
        for _, thread in self._hands.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self, nodes: Mapping[str, Node]) -> None:
        if time.monotonic() - self._retried > RETRY_SECONDS:
            self._retried = time.monotonic()
            self._slots = {node: slots for node, slots in self._slots.items() if slots}
        lost = {hand.slot.node.id for hand, _ in self._hands.values() if hand.lost.is_set()}
        for gone in lost | (self._looks.keys() | self._slots.keys()) - nodes.keys():
            self._leave(gone)
        for new in nodes.keys() - self._looks.keys() - self._slots.keys():
            share = Share(new, gpus=LOOKING_GPUS if nodes[new].gpus else 0.0)
            self._looks[new] = RayExecutor(share).submit(look)
        for seen in [node for node, future in self._looks.items() if future.done()]:
            self._slots[seen] = _slots_seen(nodes[seen], self._looks.pop(seen))
        for slot in (slot for slots in self._slots.values() for slot in slots):
            if slot.name not in self._hands or not self._hands[slot.name][1].is_alive():
                self._hands[slot.name] = self._start(Hand(slot))

    def _leave(self, node: str) -> None:
        """Give a node no new jobs until it answers again; running jobs go on till then."""
        self._looks.pop(node, None)
        self._slots.pop(node, None)
        for name, (hand, thread) in list(self._hands.items()):
            if hand.slot.node.id == node:
                hand.lost.clear()
                if not hand.busy.is_set():
                    hand.stop.set()
                if not thread.is_alive():
                    del self._hands[name]

    def _start(self, hand: Hand) -> tuple[Hand, threading.Thread]:
        worker = self._hire(hand)
        thread = threading.Thread(target=worker.run, args=(hand.stop,), name=hand.slot.name, daemon=True)
        thread.start()
        return hand, thread


def _slots_seen(node: Node, looked: "Future[Seen]") -> tuple[Slot, ...]:
    """Return the slots of a node, none if it cannot work: the log has the reason."""
    error = looked.exception()
    if error is not None:
        _log.warning("the node %s cannot tune: %s", node.name, error)
        return ()
    seen = looked.result()
    if seen.version != __version__:
        _log.warning("the node %s cannot tune: it has lospmm %s, not %s", node.name, seen.version, __version__)
        return ()
    slots = slots_of(node, seen.gpu)
    _log.info("the node %s has room for %d jobs, on GPUs: %s", node.name, len(slots), seen.gpu or "none")
    return slots


def work(database: Database, store: Store, name: str, stop: threading.Event) -> None:
    """Tune jobs until ``stop`` is set, in a process that is connected to a cluster."""
    here = NodeAffinitySchedulingStrategy(own_node(), soft=False)
    board = ray.remote(num_cpus=0, max_restarts=-1)(Board).options(scheduling_strategy=here).remote()
    name = name or new_name()

    def hire(hand: Hand) -> Worker:
        return Worker(database, store, tune_in(hand, store, board), name=f"{name}.{hand.slot.name}", gpu=hand.slot.gpu)

    ClusterWorkers(hire).run(stop)
