"""What is timed is the layer as it will be called; the clock itself needs a GPU."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

import lospmm  # noqa: E402
import lospmm.nn  # noqa: E402
from lospmm.nn import sparsify, timing  # noqa: E402
from tests.nn.models import drawn, pruned  # noqa: E402


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(4, 4, 3, padding=1), nn.Conv1d(5, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.relu(self.conv(x) + x).flatten(2)[:, :1].expand(-1, 5, -1))


@torch.no_grad()
def test_layers_are_timed_on_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    for weight in (attention.in_proj_weight, attention.out_proj.weight):
        weight.mul_(torch.rand_like(weight) < 0.2)
    ran: list[lospmm.Kernel] = []
    run = lospmm.Kernel.run_on_cpu
    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", lambda *given: ran.append(given[0]) or run(*given))
    seen: list[tuple[str, int]] = []

    def micros_of(call: Callable[[], object], _device: torch.device) -> float:
        ran.clear()
        call()  # a layer that misses its kernel warns, which is an error here
        seen.append(("sparse" if ran else "dense", len(ran)))
        return 1.0 if ran else 2.0

    monkeypatch.setattr(timing, "micros_of", micros_of)
    monkeypatch.setattr(sparsify, "misfit", lambda *_, **__: None)
    x = drawn(2, 4, 8)
    models = [
        (lospmm.nn.fused(pruned(Residual())[0]), drawn(2, 4, 5, 5), 2),
        (pruned(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), x, 2),
        (attention.eval(), (x, x, x), 2),
    ]
    for model, example, layers in models:
        seen.clear()
        report = lospmm.nn.sparsify_(model, example, device="h200", verify="none")
        assert seen == [("dense", 0)] * layers + [("sparse", 1)] * layers, str(report)
        assert len(report.sparse) == layers
