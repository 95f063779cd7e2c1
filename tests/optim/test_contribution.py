"""The weight and the signals of a rank: what may be set."""

import math
import re

import pytest
import torch
from optim.kinds import KINDS
from torch import nn

from gcnzc.exchange import Group


@pytest.fixture(params=["averaged", "drop-compute", "onebit-adam", "zero-one-adam", "local-sgd"])
def optimizer(request):
    return KINDS[request.param](nn.Linear(3, 2), Group(1, 3), signals=2)


@pytest.mark.parametrize("weight", ["x", None, math.nan, math.inf, -1.0, True])
def test_a_weight_is_a_finite_number_of_at_least_zero(optimizer, weight):
    with pytest.raises(ValueError, match=f"^weight is {weight!r}\n\nhint: give a finite number"):
        optimizer.weight = weight
    assert optimizer.weight == 1.0


def test_numbers_of_any_type_are_weights(optimizer):
    for weight in (0, 2, 0.5, torch.tensor(1.5)):
        optimizer.weight = weight
        assert optimizer.weight == float(weight)


@pytest.mark.parametrize("signals", [[True], [], (True, False, True)])
def test_the_number_of_signals_is_that_of_the_constructor(optimizer, signals):
    expected = rf"^signals is {re.escape(repr(signals))}, .* signals=2\n\nhint: .*={len(signals)} "
    with pytest.raises(ValueError, match=expected):
        optimizer.signals = signals
    assert optimizer.signals == [False, False]


@pytest.mark.parametrize("signals", ["ab", 5, None, [True, "x"], [0.5, False]])
def test_signals_are_flags(optimizer, signals):
    with pytest.raises(TypeError, match=r"^signals.*\n\nhint: "):
        optimizer.signals = signals
    optimizer.signals = (1, False)
    assert optimizer.signals == [True, False]


def test_signals_that_were_set_in_place_are_checked_when_they_are_sent(optimizer):
    optimizer.signals[1] = True
    assert optimizer.common_extras()[1:3] == [False, True]
    optimizer.signals[1] = "yes"
    with pytest.raises(TypeError, match=r"^signals\[1\] is 'yes'"):
        optimizer.common_extras()
    optimizer.signals = [False, False]
    optimizer.signals.append(True)
    with pytest.raises(ValueError, match=r"^signals is "):
        optimizer.common_extras()
