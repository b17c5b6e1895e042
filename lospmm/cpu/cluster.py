"""Blocks that share a tile: each block's mailbox in shared memory, and the cluster's barrier.

A slot of a mailbox has one element for each thread, and is written once. Correct reading takes four steps, which are
checked here, so that the result does not depend on the order in which blocks run: the writer stores (ST), makes its
stores visible (MEMBAR), arrives at the barrier, and the reader has waited at the barrier since. A store before the
sender's first wait is refused, as the receiver may not have started; so is a store that the receiver does not wait
for, as it may have left.

The barrier has phases 0, 1, ...; the prologue has arrived at the first. A block that has left counts as arrived. No
block may arrive twice in a phase (PTX ISA, ``barrier.cluster``), nor wait without having arrived, i.e. for itself. So
a waiting block of the earliest phase can always go on, and there is no other deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.machine import PEER_BYTES
from lospmm.cpu.fault import SassFault
from lospmm.cpu.geometry import Geometry, stray_access
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.space.walks import KEPT_BYTES

#: Slot 0 of thread 0 in block 0: as an address in shared memory, and as a generic one. Their low words leave room for
#: all blocks of a cluster, as the hardware's do: no sum of them carries. They differ, so that neither stands for both.
MAILBOX_ADDRESS = 1 << 10
PEERS_ADDRESS = (1 << 62) + (1 << 28)

#: The most that a block is given (CUDA C++ Programming Guide, compute capability 9.0).
SHARED_BYTES = 227 * 1024


@dataclass(slots=True, eq=False)
class Letter:
    """The contents of a slot, and the phase that a reader must have waited for; None: not known yet."""

    sender: int
    elements: NDArray[np.float32]  # (threads,)
    is_fenced: bool = False
    phase: int | None = None


@dataclass(slots=True, eq=False)
class Block:
    """The state of one part of a tile beside its registers, and its progress."""

    number: int
    columns: NDArray[np.int64]  # (threads,)
    own: NDArray[np.uint64]  # (threads,): bytes from an element of thread 0 to that of each
    slot_bytes: int
    cluster: Sequence["Block"]
    letters: dict[int, Letter] = field(default_factory=dict)  # by slot of the own mailbox
    arrived: int = 1  # phases
    waited: int = 0
    has_left: bool = False
    _sent: list[Letter] = field(default_factory=list)  # those without a phase

    @property
    def mailbox(self) -> NDArray[np.uint64]:
        """Shared-memory address of each thread's slot 0, (threads,)."""
        return cast(NDArray[np.uint64], self.own + np.uint64(MAILBOX_ADDRESS + self.number * PEER_BYTES))

    @property
    def peers(self) -> NDArray[np.uint64]:
        """Generic address of each thread's slot 0 in block 0, (threads,)."""
        return cast(NDArray[np.uint64], self.own + np.uint64(PEERS_ADDRESS))

    @property
    def is_held(self) -> bool:
        """Whether it waits for a block that has neither arrived nor left."""
        return any(other.arrived < self.waited and not other.has_left for other in self.cluster)

    def send(self, address: NDArray[np.uint64], elements: NDArray[np.float32]) -> None:
        """Write a slot of any block. Raises SassFault for another address or a receiver that may be gone."""
        if self.waited == 0:
            raise SassFault("stores before the first CLUSTER_WAIT: the receiver may not have started")
        number, slot = self._slot(address - self.peers, len(self.cluster))
        receiver = self.cluster[number]
        if slot in receiver.letters:
            before = receiver.letters[slot].sender
            raise SassFault(f"writes slot {slot} of part {number} again, part {before} has written it")
        if receiver.has_left:
            raise SassFault(f"writes slot {slot} of part {number}, which may have left")
        receiver.letters[slot] = Letter(self.number, elements)
        self._sent.append(receiver.letters[slot])

    def collect(self, address: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return the elements of an own slot, (threads,). Raises SassFault for another or an unwritten one."""
        _, slot = self._slot(address - self.mailbox, 1)
        letter = self.letters.get(slot)
        if letter is None:
            raise SassFault(f"reads slot {slot}, which nobody has written")
        if why := self._unseen(letter):
            raise SassFault(f"reads slot {slot}, which part {letter.sender} has written: {why}")
        return letter.elements

    def fence(self) -> None:
        """Make all stores so far visible to the other blocks."""
        for letter in self._sent:
            letter.is_fenced = True

    def arrive(self) -> None:
        """Arrive at the barrier. Raises SassFault if no wait separates this from the arrival before."""
        if self.arrived > self.waited:
            raise SassFault("arrives again without a CLUSTER_WAIT between")
        for letter in self._sent:
            letter.phase = self.arrived if letter.is_fenced else None
        self._sent = [letter for letter in self._sent if not letter.is_fenced]
        self.arrived += 1

    def wait(self) -> None:
        """Go on once the block is no longer held. Raises SassFault if it would wait for itself."""
        if self.arrived == self.waited:
            raise SassFault("waits without a CLUSTER_ARRIVE before: for itself, and so for ever")
        self.waited += 1

    def leave(self) -> None:
        """End the block. Raises SassFault if its mailbox may still be written."""
        for slot, letter in self.letters.items():
            if why := self._unseen(letter):
                raise SassFault(f"leaves while part {letter.sender} may still write slot {slot}: {why}")
        self.has_left = True

    def _unseen(self, letter: Letter) -> str | None:
        """Return why this block cannot rely on a slot having been written, or None."""
        if not letter.is_fenced:
            return "no MEMBAR has followed"
        if letter.phase is None:
            return "no CLUSTER_ARRIVE has followed its MEMBAR"
        return None if letter.phase < self.waited else "no CLUSTER_WAIT here has followed its CLUSTER_ARRIVE"

    def _slot(self, distance: NDArray[np.uint64], blocks: int) -> tuple[int, int]:
        """Return the block and slot that all threads address, given their distance from the first slot 0."""
        number, within = np.divmod(distance, np.uint64(PEER_BYTES))
        slot, rest = np.divmod(within, np.uint64(self.slot_bytes))
        stray = (rest != 0) | (number >= blocks) | (within + np.uint64(self.slot_bytes) > SHARED_BYTES)
        if stray.any():
            first = int(stray.argmax())
            offset = int((distance + self.own)[first : first + 1].astype(np.int64)[0])
            raise SassFault(stray_access("the mailbox", offset, int(self.columns[first])))
        if (distance != distance[0]).any():
            raise SassFault("threads of one warp go to different slots")
        return int(number[0]), int(slot[0])


def cluster_of(parts: int, geometry: Geometry, columns: NDArray[np.int64]) -> list[Block]:
    """Return the blocks that share a tile of ``columns``; a thread's number is its column's in the block."""
    own = (columns % geometry.cols * FLOAT_BYTES).astype(np.uint64)
    blocks: list[Block] = []
    blocks += [Block(number, columns, own, geometry.cols * FLOAT_BYTES, blocks) for number in range(parts)]
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class KeptAccumulators:
    """What threads keep in shared memory of the column that they are not at (``codegen.sass.walks``).

    ``threads`` are their numbers in the block. A place has four words of each thread, and no thread touches another's:
    so no barrier is needed, and what is read is what the thread itself wrote last.
    """

    threads: NDArray[np.int64]
    geometry: Geometry
    words: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by how far from the thread's first one

    @property
    def own(self) -> NDArray[np.int64]:
        """Where each thread's first word lies, (threads,)."""
        return MAILBOX_ADDRESS + KEPT_BYTES * self.threads

    def write(self, address: NDArray[np.uint64], words: NDArray[np.float32]) -> None:
        """``words``, (count, threads), one after another. Raises Fault for an address that is not the thread's."""
        for at, word in zip(self._places(address, len(words)), words, strict=True):
            self.words[at] = word.copy()

    def read(self, address: NDArray[np.uint64], count: int) -> list[NDArray[np.float32]]:
        """So many words. Raises Fault also for those that nobody has written."""
        places = self._places(address, count)
        if any(at not in self.words for at in places):
            raise SassFault("reads shared memory that it has not written")
        return [self.words[at] for at in places]

    def _places(self, address: NDArray[np.uint64], count: int) -> list[int]:
        distance = address.astype(np.int64) - self.own
        first, across = int(distance[0]), KEPT_BYTES * self.geometry.cols
        last = first + FLOAT_BYTES * count
        is_own = first >= 0 and first % across + FLOAT_BYTES * count <= KEPT_BYTES and last <= self.geometry.kept_bytes
        if (distance != first).any() or not is_own or first % (FLOAT_BYTES * count):
            raise SassFault(f"byte {first} of shared memory is not the thread's own, or not aligned")
        return list(range(first, last, FLOAT_BYTES))
