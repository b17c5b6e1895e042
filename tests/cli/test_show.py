"""What the table of a kernel says of its choice."""

from pathlib import Path

import numpy as np
import pytest

import lospmm
from lospmm.cli.show import show_manifest


@pytest.mark.usefixtures("own_cache")
def test_why_a_family_that_is_predicted_faster_was_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = lospmm.tune(np.eye(8, dtype=np.float32), n=32, device="h200", verify="none").artifact.manifest
    said = []
    for micros in (8.0, 9.0, 11.0):
        family = next(one for one in manifest["search"]["families"] if one["name"] == "csr")
        search = {**manifest["search"], "estimated_micros": 10.0, "families": [{**family, "forecast_micros": micros}]}
        show_manifest({**manifest, "search": search}, Path("folder"), as_json=False)
        said.append("another wins only below 85% of unrolled" in capsys.readouterr().out)
    assert said == [False, True, False]


@pytest.mark.usefixtures("own_cache")
def test_a_plan_that_was_not_searched_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = lospmm.tune(np.eye(8, dtype=np.float32), n=32, device="h200", verify="none").artifact.manifest
    for like in (None, "ab" * 32):
        show_manifest({**manifest, "search": {**manifest["search"], "like": like}}, Path("folder"), as_json=False)
        shown = f"that of an alike layer, {'ab' * 8}; a tuning with --each searches its own"
        assert (shown in capsys.readouterr().out) == (like is not None)
