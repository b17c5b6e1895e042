"""Options: what "auto" stands for here and elsewhere, and what is refused."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from lospmm.codegen import EMITTERS, check_target
from lospmm.errors import BadRequest
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.tuning.options import CHOICES, Options, decisive_fields, default_emitter, options_of

H200, A100 = DEVICES["h200"], DEVICES["a100"]


@pytest.mark.parametrize(
    ("device", "own", "found"),
    [
        (H200, "h200", ("sass", "gpu", "gpu")),
        (H200, None, ("sass", "none", "cpu")),
        (H200, "a100", ("sass", "none", "cpu")),
        (A100, "a100", ("ptx", "gpu", "gpu")),
        (A100, None, ("ptx", "none", "cpu")),
        (DEVICES["b200"], "b200", ("ptx", "gpu", "gpu")),
        (DEVICES["h100"], "h200", ("sass", "none", "cpu")),  # another GPU of the same architecture is another GPU
    ],
)
def test_auto_is_decided_by_the_device_and_this_machine(
    device: DeviceSpec, own: str | None, found: tuple[str, str, str]
) -> None:
    resolved = Options().resolved(device, own)
    assert (resolved.emitter, resolved.measure, resolved.verify) == found
    assert resolved.resolved(device, own) == resolved


@pytest.mark.parametrize("own", [None, "h200"])
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("verify", ["cpu", "none"])
def test_what_is_said_stays(own: str | None, emitter: str, verify: str) -> None:
    options = Options(emitter=emitter, measure="none", verify=verify, shortlist_size=3)
    assert options.resolved(H200, own) == options


def test_a_budget_is_for_timing_candidates_and_nothing_without_it() -> None:
    options = Options(budget_seconds=0.5)
    assert options.resolved(H200, "h200").budget_seconds == 0.5
    assert options.resolved(H200, None).budget_seconds is None


def test_proxies_of_nothing_are_refused() -> None:
    for nothing in ({"measure": "none"}, {"budget_seconds": 0}):
        with pytest.raises(BadRequest, match=r"^trials proxy: nothing is timed"):
            Options(trials="proxy", **nothing).resolved(H200, "h200")
    for others in ({"families": "csr,dense"}, {"memory": "low"}, {"values": "int8", "dtype": "float16"}):
        with pytest.raises(BadRequest, match=r"^trials proxy: only unrolled kernels have proxies"):
            Options(trials="proxy", **others)


def test_the_state_of_the_cache_is_for_timing_and_says_nothing_without_it() -> None:
    options = Options(cache="network")
    assert options.resolved(H200, "h200").cache == "network"
    assert (
        options.resolved(H200, None).cache
        == "cold"
        == Options(cache="warm", measure="none").resolved(H200, "h200").cache
    )
    assert Options(cache="network", budget_seconds=0).resolved(H200, "h200").cache == "cold"


def test_what_decides_an_artifact_is_all_but_a_default_that_came_later() -> None:
    assert set(asdict(Options())) - set(decisive_fields(Options())) == {"cache", "memory", "values", "each"}
    for later in ({"cache": "warm"}, {"cache": "network"}, {"memory": "low"}, {"values": "int8"}, {"each": True}):
        assert decisive_fields(Options(**later)).items() >= later.items()


@pytest.mark.parametrize(
    ("options", "own", "words"),
    [
        ({"measure": "gpu"}, None, "measure gpu: h200 is needed, and this machine has no GPU of the device table"),
        ({"verify": "gpu"}, None, "verify gpu: h200 is needed, and this machine has no GPU of the device table"),
        ({"measure": "gpu"}, "a100", "measure gpu: h200 is needed, and this machine has a100; use auto or none"),
        (
            {"measure": "none", "verify": "gpu"},
            "a100",
            "verify gpu: h200 is needed, and this machine has a100; use auto or cpu",
        ),
        ({"measure": "gpu", "verify": "gpu"}, "a100", "measure gpu: h200 is needed"),
        ({"trials": "proxy"}, None, "trials proxy: nothing is timed; use measure auto on a machine with h200"),
        ({"trials": "proxy"}, "a100", "trials proxy: nothing is timed"),
    ],
)
def test_a_gpu_that_is_not_here_is_refused(options: dict[str, Any], own: str | None, words: str) -> None:
    with pytest.raises(BadRequest, match=f"^{words}"):
        Options(**options).resolved(H200, own)
    assert Options(**options).resolved(H200, "h200").measure in ("gpu", "none")


def test_a_gpu_that_is_here_may_measure_without_verifying() -> None:
    resolved = Options(measure="gpu", verify="none").resolved(H200, "h200")
    assert (resolved.measure, resolved.verify) == ("gpu", "none")


@pytest.mark.parametrize("budget", [-1.0, float("inf"), float("nan")])
def test_a_budget_is_a_number_of_seconds(budget: float) -> None:
    with pytest.raises(BadRequest, match="give seconds, 0 or more"):
        Options(budget_seconds=budget)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shortlist_size": 1.5}, "shortlist 1.5: give a whole number"),
        ({"shortlist_size": "3"}, "shortlist '3': give a whole number"),
        ({"shortlist_size": True}, "shortlist True: give a whole number"),
        ({"shortlist_size": np.int64(0)}, "shortlist 0: at least 1"),
        ({"budget_seconds": "a"}, "budget 'a': give seconds, 0 or more"),
        ({"budget_seconds": True}, "budget True: give seconds, 0 or more"),
        ({"budget_seconds": 1j}, "budget 1j: give seconds, 0 or more"),
        ({"emitter": 3}, "emitter 3: choose one of auto"),
        ({"emitter": ["ptx"]}, r"emitter \['ptx'\]: choose one of auto"),
        ({"measure": None}, "measure None: choose one of auto"),
    ],
)
def test_values_of_another_type_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=f"^{words}"):
        Options(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"shortlist_size": np.int32(3), "budget_seconds": np.float32(0.5)}
    options = Options(**given)
    assert options == Options(shortlist_size=3, budget_seconds=0.5)
    assert json.dumps(asdict(options)) == json.dumps(asdict(Options(shortlist_size=3, budget_seconds=0.5)))


def test_every_architecture_has_a_default_emitter_that_writes_for_it() -> None:
    for device in DEVICES.values():
        default = default_emitter(device.arch)
        check_target(default, device.arch)
        assert default in CHOICES["emitter"]


def test_families_are_named_in_one_text() -> None:
    with pytest.raises(BadRequest, match="families is of type list: give a text, with commas"):
        Options(families=["csr"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"emiter": "ptx"}, "'emiter': no such option; did you mean emitter?"),
        ({"colour": 1}, "'colour': no such option; there are emitter, ranker, "),
        ({"x" * 500: 1}, f"'{'x' * 79}: no such option; there are"),
    ],
)
def test_an_option_that_there_is_not(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        options_of(given)
    assert str(refused.value).startswith(said)


def test_options_by_their_names() -> None:
    assert options_of({"emitter": "ptx", "shortlist_size": 3}) == Options(emitter="ptx", shortlist_size=3)
    with pytest.raises(BadRequest, match="emitter 'x': choose one of"):
        options_of({"emitter": "x"})
