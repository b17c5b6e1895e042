"""``lospmm join``: kernels of one matrix for several N, in place."""

from pathlib import Path

import numpy as np

import lospmm
from tests.cli.command import Command, draw

HALVES = draw(20, 60, density=0.5).astype(np.float16)
LOW = {"device": "h200", "dtype": "float16", "memory": "low", "verify": "none"}


def test_it_joins_in_place(lospmm_command: Command, tmp_path: Path) -> None:
    apart = [lospmm.tune(HALVES, n, **LOW) for n in (1, 8)]
    for at, kernel in enumerate(apart):
        kernel.save(tmp_path / str(at))
    folders = tmp_path / "0", tmp_path / "1"
    answer = lospmm_command("join", *folders)
    assert answer.status == 0 and answer.out.startswith("lospmm_bitmap_n1, lospmm_bitmap_n8: one cubin of ")
    assert (tmp_path / "0/kernel.cubin").read_bytes() == (tmp_path / "1/kernel.cubin").read_bytes()
    assert lospmm_command("inspect", tmp_path / "1").status == 0
    apart[0].save(tmp_path / "1")
    refused = lospmm_command("join", *folders)
    assert refused.status == 2 and "is given twice" in refused.error
    assert lospmm.load(tmp_path / "0").cubin == lospmm.join(apart)[0].cubin
