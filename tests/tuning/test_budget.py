"""A budget counts from its beginning, but for what it is paused for, and keeps something back for the end."""

from lospmm.tuning.budget import LEAST_SEARCH_SECONDS, Budget


class Time:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_it_is_over_when_the_rest_is_needed() -> None:
    time = Time()
    budget = Budget(60.0, reserve_seconds=5.0, clock=time)
    assert (budget.left, budget.is_over) == (60.0, False)
    time.seconds += 54.0
    assert not budget.is_over
    time.seconds += 1.0
    assert budget.is_over and budget.left == 5.0
    time.seconds += 15.0
    assert budget.left == -10.0


def test_waiting_for_others_is_not_counted() -> None:
    time = Time()
    budget = Budget(10.0, clock=time)
    time.seconds += 2.0
    with budget.paused():
        time.seconds += 3600.0
    assert budget.left == 8.0


def test_without_one_there_is_no_end() -> None:
    time = Time()
    budget = Budget(reserve_seconds=5.0, clock=time)
    time.seconds += 1e9
    assert not budget.is_over and budget.left == float("inf")


def test_what_is_measured_in_the_end_takes_as_long_as_the_longest_so_far() -> None:
    time = Time()
    budget = Budget(60.0, reserve_seconds=5.0, measurements=4, clock=time)
    for seconds in (1.0, 3.0, 2.0):
        with budget.measuring():
            time.seconds += seconds
    time.seconds += 36.0
    assert budget.left == 18.0 and not budget.is_over
    time.seconds += 1.0
    assert budget.is_over


def test_a_search_that_begins_late_times_some_kernels_all_the_same() -> None:
    time = Time()
    budget = Budget(1.0, measurements=4, clock=time)
    time.seconds += 1.5  # the GPU started
    assert budget.is_over
    for seconds in (LEAST_SEARCH_SECONDS / 2, LEAST_SEARCH_SECONDS / 4):
        with budget.measuring():
            assert not budget.is_over
            time.seconds += seconds
    assert not budget.is_over
    time.seconds += LEAST_SEARCH_SECONDS / 4
    assert budget.is_over
