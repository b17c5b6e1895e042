"""A worker that gives times by what a kernel is called: ``python named_worker.py UNROLLED_MICROS OTHER_MICROS``.

All else it answers as ``benchmarks.dry_gpu`` does, which has no GPU either.
"""

import os
import re
import sys

from benchmarks.dry_gpu import answer_to
from lospmm.gpu.messages import Answer, Measure, Measurement, packed, receive
from lospmm.gpu.timing import Timing

#: The entry of an unrolled kernel has the sizes of A in it.
UNROLLED = re.compile(r"lospmm_\d+x\d+_n\d+_")


def timed(task: object, unrolled_micros: float, other_micros: float) -> Answer:
    if not isinstance(task, Measure):
        return answer_to(task)
    micros = unrolled_micros if UNROLLED.match(task.entry) else other_micros
    return Answer(Measurement(Timing(micros, 0.01, task.effort.replays), 1e-7, None))


def main() -> None:
    unrolled_micros, other_micros = (float(text) for text in sys.argv[1:])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (request := receive(sys.stdin.buffer)) is not None:
        assert isinstance(request, tuple)
        answers.write(packed(timed(request[1], unrolled_micros, other_micros)))
        answers.flush()


if __name__ == "__main__":
    main()
