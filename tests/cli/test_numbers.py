"""Every number of every command has bounds, and the error names its option."""

import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from gcnzc.cli import main
from gcnzc.cli.commands import COMMANDS
from gcnzc.train.config import EvaluateConfig
from gcnzc.train.options import option_name

# a fanout of -1 keeps all neighbours; without an architecture nothing is compiled
LISTS = {
    "fanouts": ((), (0,), (-2,), (2**31,), (10**30,)),
    "evaluate_fanouts": ((0,), (-2,), (2**31,), (10**30,)),
    "compile_for": ((-1,), (0,), (91,), (90, 10**30)),
}
HUGE = "9" * 400
TEXTS = {
    "warmup": ("-1", "nan", "inf", "0", "1.5", HUGE),
    "local_steps": ("-1", "nan", "inf", "0", "1.5", HUGE),
    "delay": ("-1", "nan", "inf", "0", "1.5", HUGE),
    "fragments": ("-1", "0", "1.5", HUGE),
    "cache_size": ("-1", "nan", "inf", "0", HUGE, "0B", f"{HUGE}GB", "9999999999999GB"),
    "cache_memory": ("-1", "nan", "inf", "0", HUGE, "0B", f"{HUGE}GB", "9999999999999GB"),
}
# limits of single options, which are below those of their types
LIMITED = {"gossip_rate": (1000.5,), "sync_window": (10_001,)}
WHOLE = (-1, 2**63, 10**30)
REAL = (math.nan, math.inf, -math.inf, -1.0, 1e300)


def cases():
    """Every numeric option: its command, its name and values that it must reject."""
    for kind in COMMANDS:
        hints = get_type_hints(kind)
        for field in fields(kind):
            hint = hints[field.name]
            types = get_args(hint) or (hint,)
            if field.name in TEXTS:
                yield kind, field.name, TEXTS[field.name]
            elif get_origin(hint) is tuple and int in types:
                yield (
                    kind,
                    field.name,
                    [v for v in LISTS[field.name] if v != field.default],
                )
            elif float in types:
                yield kind, field.name, (*REAL, *LIMITED.get(field.name, ()))
            elif int in types:
                large = field.name in {"seed", "hidden", "nodes", "edges"}
                values = WHOLE if large else (*WHOLE, 2**41)
                yield kind, field.name, (*values, *LIMITED.get(field.name, ()))


def required(kind):
    """Values of the options that have no defaults."""
    hints = get_type_hints(kind)
    return {
        field.name: "x" if hints[field.name] is str else Path("x")
        for field in fields(kind)
        if field.default is MISSING
    }


CASES = list(cases())


def test_every_command_with_numbers_has_cases():
    names = {kind.__name__.removesuffix("Config") for kind, _, _ in CASES}
    expected = {
        "Train",
        "Evaluate",
        "Predict",
        "Make",
        "Prepare",
        "Embed",
        "EmbedNodes",
        "Check",
        "Pcie",
    }
    assert names == expected
    assert len(CASES) > 60


@pytest.mark.parametrize(
    ("kind", "name", "values"), CASES, ids=[f"{kind.__name__}-{name}" for kind, name, _ in CASES]
)
def test_a_number_out_of_bounds_is_rejected(kind, name, values):
    # without it, its options are rejected with any value
    switches = {"correct_and_smooth": True} if kind is EvaluateConfig else {}
    option = "fanout" if name in ("fanouts", "evaluate_fanouts") else option_name(name)
    for value in values:
        with pytest.raises(ValueError, match=r"(?s)^.*\n\nhint: ") as error:
            kind(**required(kind), **switches, **{name: value})
        assert option in str(error.value), value


def test_the_command_line_rejects_numbers_out_of_bounds(capsys):
    for words in (
        ["embed", "x", "y", "--dims", "-3"],
        ["pcie", "--megabytes", "9999999999999"],
        ["prepare", "x", "y", "--pitch-bytes", "-1"],
    ):
        assert main(words) == 2
        assert f"error: {words[-2]} must be at " in capsys.readouterr().err
