"""A warp whose results land when they land: what becomes of a program where memory takes the times that are drawn.

Values are symbols: a result stands for its instruction and the values that it read. So a program is right if each
value is the one that ``in_order`` gives, whatever its instructions compute.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from lospmm.codegen.sass.form import NO_BARRIER
from lospmm.cpu.hazards import LATENCY
from tests.cpu.drawn_machine_code import LOADS, STORES, Step

#: Which value each store stores, and what each register holds at the end.
Outcome = tuple[dict[int, tuple[int, ...]], dict[int, int]]


class Symbols:
    """A number for each distinct value."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, *value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def assert_in_time(program: Sequence[Step], filled: Sequence[int], seed: int) -> None:
    """Whatever memory takes, the program does what it does in order."""
    symbols, rng = Symbols(), np.random.default_rng(seed)
    expected = in_order(program, filled, symbols)
    for _ in range(5):
        assert timed(program, filled, symbols, rng) == expected


def in_order(program: Sequence[Step], filled: Sequence[int], symbols: Symbols) -> Outcome:
    """Each instruction is done before the next one begins."""
    held = {register: symbols.of("start", register) for register in filled}
    stored = {}
    for number, step in enumerate(program):
        values = tuple(held[register] for register in step.reads)
        stored.update({number: values} if step.op in STORES else {})
        held.update({register: symbols.of(number, register, values) for register in step.writes})
    return stored, held


def timed(program: Sequence[Step], filled: Sequence[int], symbols: Symbols, rng: np.random.Generator) -> Outcome:
    """Loads and stores read and write at times drawn for each."""
    held = {register: symbols.of("start", register) for register in filled}
    stored: dict[int, tuple[int, ...]] = {}
    counts = [0] * 8
    events: list[tuple[int, int, Callable[[], None]]] = []
    clock = 0

    def at(time: int, action: Callable[[], None]) -> None:
        heapq.heappush(events, (time, next_event[0], action))
        next_event[0] += 1

    def write(step: Step, number: int, values: tuple[int, ...]) -> None:
        held.update({register: symbols.of(number, register, values) for register in step.writes})

    def count(scoreboard: int, change: int) -> None:
        counts[scoreboard] += change

    def read(step: Step, number: int, written: int) -> None:
        values = tuple(held[register] for register in step.reads)
        if step.op in STORES:
            stored[number] = values
        else:
            at(written, lambda: write(step, number, values))

    def happen(until: float) -> None:
        while events and events[0][0] <= until:
            heapq.heappop(events)[2]()

    def announce(scoreboard: int, issued: int, done: int) -> None:
        if scoreboard != NO_BARRIER:
            at(issued + 2, lambda: count(scoreboard, 1))
            at(max(done, issued + 2) + 1, lambda: count(scoreboard, -1))

    next_event = [0]
    for number, step in enumerate(program):
        happen(clock)
        while any(counts[scoreboard] for scoreboard in range(6) if step.form["wait"][0] >> scoreboard & 1):
            clock = events[0][0]
            happen(clock)
        issued = clock
        if step.op in (*LOADS, *STORES):
            reading = issued + int(rng.integers(1, 40))
            written = reading + int(rng.integers(1, 40))
            at(reading, lambda step=step, number=number, written=written: read(step, number, written))
            announce(int(step.form["read_barrier"][0]), issued, reading)
            announce(int(step.form["write_barrier"][0]), issued, written)
        elif step.op in LATENCY:
            values = tuple(held[register] for register in step.reads)
            landing = issued + LATENCY[step.op][0]
            at(landing, lambda step=step, number=number, values=values: write(step, number, values))
        clock += max(1, int(step.form["stall"][0]))
    happen(float("inf"))
    return stored, held
