"""Which GPU's models serve another that nobody has timed."""

import math
from collections.abc import Collection

from lospmm.problem.device import DEVICES, DeviceSpec


def card_for(device: DeviceSpec, trained: Collection[str]) -> str:
    """Return the name of the GPU in ``trained`` whose models serve ``device``.

    That is its own, or else the most alike of its architecture: features and forecasts count cycles of an SM and
    bytes of a cycle, so models hold for it about as well (docs/ranker.md). If there is none, the device's own name.
    """
    if device.name in trained:
        return device.name
    alike = [DEVICES[name] for name in sorted(trained) if name in DEVICES and DEVICES[name].arch == device.arch]
    return min(alike, key=lambda card: _distance(card, device), default=device).name


def _distance(one: DeviceSpec, other: DeviceSpec) -> float:
    """Return how far apart SMs, and an SM's shares of the bandwidth in a cycle and of the L2 cache are."""

    def traits(device: DeviceSpec) -> tuple[float, ...]:
        return device.sms, device.memory_bandwidth / device.clock_hz / device.sms, device.l2_bytes / device.sms

    return sum(abs(math.log(mine / its)) for mine, its in zip(traits(one), traits(other), strict=True))
