"""Scripts that make the shipped weights and constants anew, and the data that they are made from (rank_model/data).

| shipped | made from | commands, each ``python -m fitting.NAME`` |
|---|---|---|
| lospmm_rank/weights/families | families.jsonl, untimed.jsonl, dense_times.jsonl, large.jsonl | fit_families |
| lospmm_rank/weights/untimed | untimed.jsonl, untimed.npz | fit_untimed |
| ``lospmm.estimate.RATES`` | estimate_on_gpu.jsonl | fit_estimate |
| rates of tensor cores in lospmm/families | tensor_core.jsonl, two_of_four.jsonl, families.jsonl | fit_tensor_core |

untimed, dense_times, large and estimate_on_gpu time what is learned from, on a GPU; families_forecasts takes new
forecasts into families.jsonl. families, tensor_core and two_of_four lie in benchmarks/results. The rank model itself,
lospmm_rank/weights/h200.txt, is made by ``lospmm train-ranker rank_model/data/h200.npz``.
"""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
