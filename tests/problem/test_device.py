import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.errors import BadRequest
from lospmm.problem.device import CHECKS, DEVICES, DeviceSpec, find_device, load_device

DOCUMENT = Path(__file__).parents[2] / "docs" / "devices.md"
KINDS = {field.name: field.type for field in fields(DeviceSpec)}
FP32_LANES = {"sm_70": 64, "sm_75": 64, "sm_80": 64, "sm_86": 128, "sm_89": 128, "sm_90": 128, "sm_100": 128}

#: Operations of an SM's dense tensor cores in a cycle, 16-bit elements with sums in fp32; half of it with TF32.
TENSOR_OPERATIONS = {
    "v100": 1024,
    "rtx2080ti": 512,
    "a100": 2048,
    "rtx3090": 512,
    "l40s": 1024,
    "rtx4090": 512,
    "h100": 4096,
    "h100-pcie": 4096,
    "h200": 4096,
    "b200": 8192,
}

devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())


def toml(figures: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in figures.items())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def refusal(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(BadRequest) as refused:
        load_device(file)
    assert str(refused.value).startswith(f"{file}: ")
    return str(refused.value)


def test_the_gpus_of_the_paper_and_their_successors_are_known():
    known = {"rtx2080ti", "v100", "a100", "rtx3090", "l40s", "rtx4090", "h100", "h100-pcie", "h200", "b200"}
    assert set(DEVICES) == known
    assert all(name == device.name for name, device in DEVICES.items())


@devices
def test_the_peak_follows_from_lanes_and_clock(device: DeviceSpec):
    assert device.sms * FP32_LANES[device.arch] * 2 * device.clock_hz == pytest.approx(device.peak_flops, rel=0.02)


def tensor_rates(device: DeviceSpec) -> tuple[float, float, float]:
    return device.tf32_flops, device.fp16_flops, device.bf16_flops


@devices
def test_the_rates_of_tensor_cores_follow_from_their_clock(device: DeviceSpec):
    tf32, fp16, bf16 = tensor_rates(device)
    assert 0.9 < fp16 / (device.sms * TENSOR_OPERATIONS[device.name] * device.clock_hz) < 1.01
    is_ampere = int(device.arch.removeprefix("sm_")) >= 80
    assert (bf16, tf32) == ((fp16, pytest.approx(fp16 / 2, rel=0.02)) if is_ampere else (0, 0))


@devices
def test_only_the_reserved_bytes_keep_a_block_from_all_shared_memory(device: DeviceSpec):
    assert device.shared_bytes_per_block + device.reserved_shared_bytes == device.shared_bytes_per_sm
    assert device.reserved_shared_bytes % device.shared_unit_bytes == 0


@devices
def test_a_complete_file_gives_the_same_device(device: DeviceSpec, file: Path):
    file.write_text(toml(asdict(device)))
    assert load_device(file) == device


@pytest.mark.parametrize("base", DEVICES)
def test_a_file_with_a_base_changes_what_it_names(base: str, file: Path):
    file.write_text(toml({"base": base, "sms": 7, "memory_bandwidth": 1}))
    device = load_device(file)
    assert device == replace(DEVICES[base], name="mine", sms=7, memory_bandwidth=1.0)
    assert isinstance(device.memory_bandwidth, float)


def test_a_device_is_found_by_name_or_file(file: Path):
    assert find_device("h200") is find_device("H200") is DEVICES["h200"]
    file.write_text('base = "h200"\nname = "half"\nsms = 66\n')
    assert find_device(str(file)) == replace(DEVICES["h200"], name="half", sms=66)


@pytest.mark.parametrize(("name", "meant"), [("H20", "h200"), ("rtx-4090", "rtx4090"), ("2080ti", "rtx2080ti")])
def test_a_wrong_name_is_answered_with_the_right_one(name: str, meant: str):
    with pytest.raises(BadRequest, match=f"did you mean .*{meant}"):
        find_device(name)


def test_a_strange_name_is_answered_with_the_list():
    with pytest.raises(BadRequest) as refused:
        find_device("quantum")
    assert str(refused.value).startswith("unknown device 'quantum': expected")
    assert ", ".join(DEVICES) in str(refused.value)


def test_a_missing_file_is_a_bad_request(tmp_path: Path):
    with pytest.raises(BadRequest, match=r"absent\.toml: cannot be read: No such file"):
        find_device(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sms = ", "expected TOML"),
        ('base = "h20"', "base = 'h20' (did you mean "),
        ("base = 9", "base = 9: expected one of v100, "),
        ('base = "h200"\nsm = 1', "unknown key 'sm' (did you mean sms?)"),
        ('base = "h200"\n[figures]\nsms = 1', "unknown key 'figures'"),
        ("sms = 66", "expected also title, arch, warp_size, "),
        ('base = "h200"\nsms = "66"', "sms = '66': expected a whole number of at least 1"),
        ('base = "h200"\nsms = true', "sms = True: expected a whole number"),
        ('base = "h200"\nsms = 66.0', "sms = 66.0: expected a whole number"),
        ('base = "h200"\nsms = 0', "sms = 0: expected a whole number of at least 1"),
        ('base = "h200"\nreserved_registers = -1', "reserved_registers = -1: expected a whole number of at least 0"),
        ('base = "h200"\ntitle = ""', "title = '': expected a text that is not empty"),
        ('base = "h200"\ntitle = 200', "title = 200: expected a text"),
        ('base = "h200"\nclock_hz = nan', "clock_hz = nan: expected a number above zero"),
        ('base = "h200"\nclock_hz = inf', "clock_hz = inf: expected a number above zero"),
        ('base = "h200"\nclock_hz = -1e9', "clock_hz = -1000000000.0: expected a number above zero"),
        ('base = "h200"\nclock_hz = true', "clock_hz = True: expected a number above zero"),
        ('base = "h200"\nclock_hz = 1' + "0" * 400, "expected a number above zero"),
        ('base = "h200"\narch = "90"', "arch = '90': expected sm_ and a number"),
        ('base = "h200"\narch = "sm_90a "', "arch = 'sm_90a ': expected sm_ and a number"),
        ('base = "h200"\nthreads_per_sm = 512', "threads_per_block = 1024: expected at most threads_per_sm"),
        ('base = "h200"\nthreads_per_block = 100', "threads_per_block = 100: expected a multiple of warp_size"),
        ('base = "h200"\nthreads_per_sm = 2050', "threads_per_sm = 2050: expected a multiple of warp_size"),
        ('base = "h200"\nregisters_per_sm = 9', "registers_per_block = 65536: expected at most registers_per_sm"),
        ('base = "h200"\nreserved_registers = 255', "reserved_registers = 255: expected below registers_per_thread"),
        ('base = "h200"\nshared_bytes_per_block = 233472', "shared_bytes_per_block = 233472: expected at most"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_expectation(text: str, said: str, file: Path):
    assert said in refusal(file, text)


def test_a_file_that_is_not_text_is_refused(file: Path):
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="expected TOML"):
        load_device(file)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_100", "sm_103a"])
def test_architectures_with_and_without_their_own_features_are_accepted(arch: str, file: Path):
    file.write_text(toml({"base": "h200", "arch": arch}))
    assert load_device(file).arch == arch


@pytest.fixture(scope="session")
def any_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices") / "mine.toml"


@given(
    base=st.sampled_from(sorted(DEVICES)),
    key=st.sampled_from([key for key, kind in KINDS.items() if kind is not str]),
    value=st.integers(max_value=-1) | st.booleans() | st.text(st.characters(codec="ascii")) | st.just([1]),
)
def test_no_figure_takes_a_negative_number_or_another_type(any_file: Path, base: str, key: str, value: object):
    assert f": {key} = {value!r}: expected " in refusal(any_file, toml({"base": base, key: value}))


@given(
    base=st.sampled_from(sorted(DEVICES)),
    figures=st.dictionaries(st.sampled_from([key for key, kind in KINDS.items() if kind is int]), st.integers(0, 4096)),
)
def test_what_is_loaded_satisfies_every_check(any_file: Path, base: str, figures: dict[str, int]):
    any_file.write_text(toml({"base": base, **figures}))
    try:
        device = load_device(any_file)
    except BadRequest as refused:
        assert any(f"{key} = " in str(refused) for key in KINDS)
    else:
        assert device == replace(DEVICES[base], name="mine", **figures)
        assert all(check.holds(device) for check in CHECKS)


@devices
def test_the_document_has_a_row_for_every_device(device: DeviceSpec):
    """Limits and sources are in the code alone; bf16 and TF32 follow from fp16 (the test of tensor cores above)."""
    row = (
        f"| `{device.name}` | {device.title} | {device.arch} | {device.sms} "
        f"| {device.peak_flops / 1e12:.1f} | {device.memory_bandwidth / 1e9:.0f} | {device.l2_bytes / 2**20:g} "
        f"| {device.fp16_flops / 1e12:g} |"
    )
    assert row in DOCUMENT.read_text().splitlines()
    assert device.source


def test_the_document_explains_every_key_and_check():
    text = DOCUMENT.read_text()
    assert [key for key in KINDS if f"`{key}`" not in text] == []
    assert [check for check in CHECKS if f"- `{check.key}`: {check.expected}." not in text] == []


def test_the_example_of_the_document_loads(file: Path):
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    file.write_text(example)
    device = load_device(file)
    assert (device.name, device.sms, device.arch) == ("h200-half", 66, "sm_90")
