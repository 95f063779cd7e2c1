import pytest

from gcnzc.optim.synchronous.one_bit_adam import FreezeRule


def frozen_at(rule, norm_at, steps):
    """The first step after which a rule wants to freeze, or 0."""
    for step in range(1, steps + 1):
        if rule.should_freeze(step, norm_at(step) if rule.is_due(step) else None):
            return step
    return 0


def test_it_checks_once_in_an_averaging_period():
    assert FreezeRule(0.999).interval == 1000
    assert FreezeRule(0.9).interval == 10
    assert FreezeRule(0.0).interval == 1
    rule = FreezeRule(0.9, least=25)
    assert [step for step in range(1, 61) if rule.is_due(step)] == [30, 40, 50, 60]


@pytest.mark.parametrize(("patience", "step"), [(1, 20), (2, 30), (5, 60)])
def test_a_stable_variance_is_frozen_after_the_given_number_of_checks(patience, step):
    assert frozen_at(FreezeRule(0.9, patience=patience), lambda _: 3.0, 100) == step


def test_neither_growth_nor_decline_is_stable():
    # the paper's rule, a ratio of at least 0.96, would take the first for settled at once
    assert frozen_at(FreezeRule(0.9), lambda step: 1.05 ** (step / 10), 500) == 0
    assert frozen_at(FreezeRule(0.9), lambda step: 0.95 ** (step / 10), 500) == 0
    assert frozen_at(FreezeRule(0.9), lambda step: 1.03 ** (step / 10), 500) == 30
    assert frozen_at(FreezeRule(0.9), lambda step: 0.97 ** (step / 10), 500) == 30


def test_a_jump_restarts_the_count_of_checks():
    assert frozen_at(FreezeRule(0.9), lambda step: 1.0 if step <= 20 else 2.0, 100) == 50


def test_it_freezes_between_the_smallest_and_the_largest_number_of_steps():
    assert frozen_at(FreezeRule(0.9, least=45), lambda _: 1.0, 200) == 70
    assert frozen_at(FreezeRule(0.9, most=33), lambda step: 2.0**step, 200) == 33


def test_a_zero_variance_is_not_stable():
    assert frozen_at(FreezeRule(0.9), lambda _: 0.0, 200) == 0
    assert frozen_at(FreezeRule(0.9), lambda _: float("nan"), 200) == 0


def test_it_resumes_from_its_state():
    rule, other = FreezeRule(0.9), FreezeRule(0.9)
    assert frozen_at(rule, lambda _: 1.0, 25) == 0
    # as OneBitAdam does with the norms of its state
    other.norms = rule.norms
    assert other.should_freeze(30, 1.0)
    assert other.norms == [1.0, 1.0, 1.0]
