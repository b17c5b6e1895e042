"""Blocks that share a tile: each block's mailbox in shared memory, and the barrier in it.

A slot of a mailbox has one element for each thread, and is written once. Correct reading takes three steps, which are
checked here, so that the result does not depend on the order in which blocks run: the writer stores (STAS), which also
tells the barrier in the mailbox; the reader has told the barrier how many bytes come (EXPECT), and has waited for them
(AWAIT). A store before the sender's meeting is refused, as the receiver may not have started or made its barrier; so is
a store that the receiver does not wait for, as it may have left. A block that waits for more than the others send would
wait for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.machine import PEER_BYTES
from lospmm.cpu.geometry import Geometry, SassFault, stray_access
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.space.candidates import BARRIER_BYTES
from lospmm.space.walks import KEPT_BYTES

#: Where a mailbox of block 0 begins, as an address of the cluster. Its low bits leave room for all blocks of a cluster,
#: as the hardware's do: no sum of them carries.
MAILBOX_ADDRESS = 1 << 10

#: The most that a block is given (CUDA C++ Programming Guide, compute capability 9.0).
SHARED_BYTES = 227 * 1024


@dataclass(slots=True, eq=False)
class Block:
    """The state of one part of a tile beside its registers, and its progress."""

    number: int
    columns: NDArray[np.int64]  # (threads,)
    own: NDArray[np.uint64]  # (threads,): bytes from an element of thread 0 to that of each
    row_bytes: NDArray[np.int64]  # (threads,): of a slot, of all threads of the block on the GPU
    slot_bytes: int  # from a slot to the next
    cluster: Sequence["Block"]
    letters: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by slot of the own mailbox
    expected: int | None = None  # letters
    has_met: bool = False
    has_waited: bool = False
    has_left: bool = False

    @property
    def peers(self) -> tuple[NDArray[np.uint64], int]:
        """Addresses in block 0: of the mailbox, plus each thread's word of a slot, (threads,), and of its barrier."""
        return cast(NDArray[np.uint64], self.own + np.uint64(MAILBOX_ADDRESS)), MAILBOX_ADDRESS

    @property
    def told(self) -> NDArray[np.int64]:
        """What the first thread of each block tells the barrier for a slot, and 0 in the others, (threads,)."""
        _, first = np.unique(self.columns - self.own.astype(np.int64) // FLOAT_BYTES, return_index=True)
        found = np.zeros_like(self.row_bytes)
        found[first] = self.row_bytes[first]
        return found

    @property
    def is_held(self) -> bool:
        """Whether it waits for a letter. Raises SassFault if nobody will send one."""
        if not self._lacks:
            return False
        if all(other.has_left or other._lacks for other in self.cluster):
            raise SassFault(f"waits for ever: {len(self.letters)} of {self.expected} slots are written")
        return True

    @property
    def _lacks(self) -> bool:
        return self.has_waited and self.expected is not None and len(self.letters) < self.expected

    def send(self, address: NDArray[np.uint64], barrier: NDArray[np.uint32], elements: NDArray[np.float32]) -> None:
        """Write a slot of any block. Raises SassFault for another address or a receiver that may be gone."""
        if not self.has_met:
            raise SassFault("stores before the CLUSTER_WAIT: the receiver may not have started")
        number, slot = self._slot(address, len(self.cluster))
        if (barrier != MAILBOX_ADDRESS + number * PEER_BYTES).any():
            raise SassFault(f"writes a slot of part {number} and tells another barrier")
        receiver = self.cluster[number]
        if slot in receiver.letters:
            raise SassFault(f"writes slot {slot} of part {number} again")
        if receiver.has_left:
            raise SassFault(f"writes slot {slot} of part {number}, which may have left")
        receiver.letters[slot] = elements
        receiver.check_count()

    def expect(self, barrier: NDArray[np.uint32], count: NDArray[np.uint32], row_bytes: NDArray[np.int64]) -> None:
        """Tell the own barrier of ``count`` bytes, in the threads that do, of ``row_bytes`` a slot each."""
        self._check_barrier(barrier)
        if self.expected is not None:
            raise SassFault("tells its barrier twice")
        if len(count) != np.count_nonzero(self.told):
            raise SassFault("not one thread of each block tells its barrier")
        slots, rest = np.divmod(count.astype(np.int64), row_bytes)
        if rest.any() or (slots != slots[0]).any():
            raise SassFault(f"tells its barrier {count[0]} bytes, where a slot has {row_bytes[0]}")
        self.expected = int(slots[0])
        self.check_count()

    def wait(self, barrier: NDArray[np.uint32]) -> None:
        """Begin to wait for all letters: until it is no longer held. Raises SassFault for another barrier."""
        self._check_barrier(barrier)
        if self.expected is None:
            raise SassFault("waits at a barrier that was not told how many bytes come")
        self.has_waited = True

    def collect(self, address: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return the elements of an own slot, (threads,). Raises SassFault for another or an unwritten one."""
        _, slot = self._slot(address - np.uint64(self.number * PEER_BYTES), 1)
        if slot not in self.letters:
            raise SassFault(f"reads slot {slot}, which nobody has written")
        if not self.has_waited:
            raise SassFault(f"reads slot {slot} before AWAIT")
        return self.letters[slot]

    def leave(self) -> None:
        """End the block. Raises SassFault if its mailbox may still be written."""
        if self.letters and not self.has_waited:
            raise SassFault(f"leaves while slot {min(self.letters)} may still be written: no AWAIT")
        self.has_left = True

    def check_count(self) -> None:
        """Raise SassFault where more came than the barrier was told."""
        if self.expected is not None and len(self.letters) > self.expected:
            raise SassFault(f"part {self.number} waits for {self.expected} slots, and {len(self.letters)} are written")

    def _check_barrier(self, barrier: NDArray[np.uint32]) -> None:
        if not self.has_met:
            raise SassFault("uses a barrier before the CLUSTER_WAIT: it may not have been made")
        if (barrier != MAILBOX_ADDRESS + self.number * PEER_BYTES).any():
            raise SassFault("a barrier that is not the block's own")

    def _slot(self, address: NDArray[np.uint64], blocks: int) -> tuple[int, int]:
        """Return the block and slot that all threads address, of the first ``blocks``."""
        distance = address - self.peers[0]
        number, within = np.divmod(distance, np.uint64(PEER_BYTES))
        slot, rest = np.divmod(within - np.uint64(BARRIER_BYTES), np.uint64(self.slot_bytes))
        stray = (rest != 0) | (number >= blocks) | (within < BARRIER_BYTES)
        stray |= within + np.uint64(self.slot_bytes) > SHARED_BYTES
        if stray.any():
            first = int(stray.argmax())
            offset = int((distance + self.own)[first : first + 1].astype(np.int64)[0])
            raise SassFault(stray_access("the mailbox", offset, int(self.columns[first])))
        if (distance != distance[0]).any():
            raise SassFault("threads of one warp go to different slots")
        return int(number[0]), int(slot[0])


def cluster_of(parts: int, geometry: Geometry, columns: NDArray[np.int64]) -> list[Block]:
    """Return the blocks that share a tile of ``columns``; a thread's number is its column's in the block."""
    thread = columns % geometry.cols
    own, row_bytes = (thread * FLOAT_BYTES).astype(np.uint64), np.minimum(geometry.cols, geometry.n - columns + thread)
    blocks: list[Block] = []
    rest = FLOAT_BYTES * row_bytes, geometry.cols * FLOAT_BYTES, blocks
    blocks += [Block(number, columns, own, *rest) for number in range(parts)]
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
