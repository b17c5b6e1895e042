"""Progress where there is no terminal: a line now and then."""

import time

import pytest

from lospmm.progress import LINE_SECONDS, kernels_told, reported


def test_a_long_stage_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with reported(quiet=False) as report:
        report("emit", 0, 1)
        report("emit", 1, 1)
        report("emit", 1, 1)
        for done in range(7):
            report("measure_trials", done, 8)
            now += LINE_SECONDS / 2
        report("compile", 0, 2)
        report("verify", 0, 1)
        for done in range(4):
            report("verify", 25 * done, 100)
            now += LINE_SECONDS / 2
    assert capsys.readouterr().err.splitlines() == [
        "emit: done at 0.0 s",
        "measure_trials: 0 of 8 at 0.0 s",
        "measure_trials: 2 of 8 at 10.0 s",
        "measure_trials: 4 of 8 at 20.0 s",
        "measure_trials: 6 of 8 at 30.0 s",
        "compile: 0 of 2 at 35.0 s",
        "verify: 50 of 100 at 45.0 s",
    ]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with reported(quiet=True) as report:
        report("emit", 1, 1)
    assert capsys.readouterr().err == ""


def test_kernels_say_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    often, seldom = kernels_told(224), kernels_told(224, every_seconds=LINE_SECONDS)
    for number in range(2, 5):  # the first ones were tuned before
        for begin in (often, seldom):
            begin(number, "abc"[number - 2])
        now += 0.6 * LINE_SECONDS
    assert capsys.readouterr().err.splitlines() == [
        "kernel 3 of 224: a",
        "kernel 4 of 224: b, about 22 min left",
        "kernel 5 of 224: c, about 22 min left",
        "kernel 5 of 224: c, about 22 min left",
    ]
