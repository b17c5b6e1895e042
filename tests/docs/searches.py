"""The tables of docs/decisions/0015: what a search costs, and what it loses when it is replayed."""

from tests.docs.results import records, table

_STEPS = ("reorder", "compile_trials", "measure_trials", "compare")


def cost() -> str:
    """Of one layer, in a process that is warm and in one that is not, and of a whole model."""
    lines = [
        (
            f"{record['layers']} layers" if record["what"] == "model" else record["what"],
            str(record["timed"]),
            "-" if record["wall_seconds"] is None else f"{record['wall_seconds']:.1f}",
            *(f"{record['seconds'][step]:.2f}" for step in _STEPS),
        )
        for record in records("search_cost")
        if record["what"].startswith(("warm", "cold", "model"))
    ]
    titles = ("process", "kernels timed", "in all", "reorder", "wait for builds", "time kernels", "compare")
    return table(titles, lines, right=6)


def replayed() -> str:
    """Mean, ninth decile and worst loss of each policy."""
    lines = [
        (
            record["policy"],
            f"{record['mean_timed']:.0f}",
            *(f"{record[name]:.2%}" for name in ("mean_loss", "p90_loss", "worst_loss")),
        )
        for record in records("search_replay")
    ]
    return table(("policy", "kernels timed", "mean loss", "of nine in ten at most", "worst"), lines, right=4)
