"""Scripts that renew the shipped weights and constants, and the data that they are made from.

| shipped | made from | commands, each ``python -m fitting.NAME`` |
|---|---|---|
| lospmm_rank/weights/families | families.jsonl, untimed.jsonl, dense_times.jsonl, large.jsonl | fit_families |
| lospmm_rank/weights/untimed | untimed.jsonl, untimed.npz | fit_untimed |
| ``lospmm.space.estimate.RATES`` | estimate_on_gpu.jsonl | fit_estimate |
| rates of tensor cores in lospmm/families | tensor_core.jsonl, two_of_four.jsonl, families.jsonl | fit_tensor_core |
| clusters in lospmm/problem/device.py | a run on a GPU | clusters |

untimed, dense_times, large, estimate_on_gpu and tensor_core time what is learned from, on a GPU; families_forecasts
takes new forecasts into families.jsonl, which lies in benchmarks/results. narrow.jsonl has times of 16-bit kernels of
one and two columns to a thread, which gave ``Rates.request_cycles``. rank_model/README.md says
what makes the rank models; weights/untimed is fitted on the score of the H200's.
"""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
