"""Compute the documentation's table about DropCompute.

It is registered in `bench/docs/result_tables.py`.
"""

import statistics

from bench.docs.result_tables import Line, markdown, newest, read, table, with_caption


@table
def drop_compute() -> str:
    """Return the table of simulated steps of DropCompute, by the spread of the times."""
    lines = newest(read("dropcompute"), "sigma", "seed")
    rows = []
    for sigma in sorted({sigma for sigma, _ in lines}):
        of_sigma = [line for (each, _), line in lines.items() if each == sigma]

        def mean(name: str, of_sigma: list[Line] = of_sigma) -> float:
            return statistics.mean(line[name] for line in of_sigma)

        rows.append(
            [
                f"{sigma:g}",
                *(f"{mean(name):.2f}" for name in ("predicted_speed", "measured_speed")),
                f"{100 * mean('measured_dropped'):.1f}",
                *(f"{mean(name):.2f}" for name in ("accuracy_percent", "plain_accuracy_percent")),
            ]
        )
    heads = ["σ of the logarithm of the times", "predicted speed", "measured speed", "dropped, %"]
    heads += ["accuracy, %", "accuracy without drops, %"]
    command = "python -m bench.strategies.dropcompute"
    return with_caption(markdown(heads, rows), lines.values(), command)
