"""A process that answers as one that runs kernels does, on a machine without a GPU: after about as long, with made up
times. What a search costs beside the GPU is real.

Tests and dry runs start it as ``python -m benchmarks.dry_gpu``.
"""

import time

from lospmm.gpu.libraries import BaselineTime, VariantTime
from lospmm.gpu.libraries.work import BaselineTask
from lospmm.gpu.messages import Answer, Measure, Measurement, Prepare, Ready, channel, receive, send
from lospmm.gpu.timing import Timing

#: What these take on an H200, in seconds: its context, A and B, a kernel beside its replays, and a library.
START, PREPARE, KERNEL, LIBRARY = 1.0, 0.05, 0.006, 0.1
LAUNCH_MICROS = 25.0


def answer_to(task: object) -> Answer:
    match task:
        case str():  # which library to open
            return Answer()
        case Prepare() | dict():  # or what differs but A
            time.sleep(PREPARE)
            return Answer(Ready("a dry run", 5))
        case Measure():
            micros = LAUNCH_MICROS * (1 + len(task.image) % 1009 / 1009)
            time.sleep(KERNEL + (task.effort.warm_micros + task.effort.replays * task.effort.launches * micros) * 1e-6)
            return Answer(Measurement(Timing(micros, 0.01, task.effort.replays), 1e-7, None))
        case BaselineTask():
            time.sleep(LIBRARY)
            way = VariantTime("dry", Timing(100.0, 0.01, 15), 1e-7, None)
            return Answer(BaselineTime(task.name, "dry", (way,), None))
    return Answer(fault=f"{task!r:.80}", healthy=False)


def main() -> None:
    requests, answers = channel()
    time.sleep(START)
    while (request := receive(requests)) is not None:
        assert isinstance(request, tuple)
        send(answers, answer_to(request[1]))


if __name__ == "__main__":
    main()
