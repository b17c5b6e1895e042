"""The learned ranker of section 3.5: LambdaMART on Table 1 and the schedule's axes (docs/ranker.md).

``collect`` measures what it learns from, ``dataset`` keeps that, ``train`` makes the model, ``evaluate`` judges it
and ``lambdamart`` is the ranker.
"""

#: GPUs that the models that come with lospmm were trained on.
TRAINED = frozenset({"h100", "h200"})
