"""Kernels of ``benchmarks.overlapping``: that they wait, where they should."""

from pathlib import Path

import pytest

from benchmarks import overlapping, placing
from benchmarks.placing import Case
from lospmm.device import DEVICES
from lospmm.model import Schedule, TileSize
from lospmm.toolchain import elf
from lospmm.toolchain.cubin import machine_code

#: nvdisasm's ACQBULK and PREEXIT.
WAIT, START = 0x82E, 0x82D


def test_what_waits_and_what_starts_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "detect_device", lambda: DEVICES["h200"])
    case = Case("shapes", (48, 64, 256), 0.8, TileSize(16, 64), Schedule(8))
    heads = {}
    for form, kernel in overlapping.built(case, str(tmp_path)).items():
        text = next(one.content for one in elf.sections(kernel.cubin) if one.name == f".text.{kernel.entry}")
        tiles = machine_code(kernel.cubin, kernel.entry, "sm_90")
        head = text[: len(text) - 16 * len(tiles.form)]
        heads[form] = [int.from_bytes(head[at : at + 2], "little") & 0xFFF for at in range(0, len(head), 16)]
    ordinary, waits, starts = heads.values()
    assert not {WAIT, START} & {*ordinary}
    assert waits.count(WAIT) == 1 and START not in waits
    assert starts.count(WAIT) == 1 == starts.count(START) and starts.index(START) < starts.index(WAIT)
