"""A worker on the CPU whose libraries are the fake ones: ``python bench_worker.py GATE LIBRARIES``."""

import sys

from lospmm.gpu.libraries import cublas, cusparse
from tests.core import fake_gpu


def main() -> None:
    cusparse.find = cublas.find = lambda _name: sys.argv[2]
    fake_gpu.main()


if __name__ == "__main__":
    main()
