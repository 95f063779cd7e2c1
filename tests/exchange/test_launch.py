"""Invalid environment variables and time limits, before the workers connect."""

import math

import numpy as np
import pytest
import torch.distributed as dist

from gcnzc.exchange import Group, current_group, init_group

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("seconds", [math.nan, math.inf, "a", None, 1e300, 0, -1, 1e-6, True])
def test_an_invalid_time_limit_is_an_error_with_one_rank(seconds):
    expected = r"timeout_s is .*\n\nhint: .* from 0.001 to 1e"
    with pytest.raises((TypeError, ValueError), match=expected):
        Group(timeout_s=seconds)
    with pytest.raises((TypeError, ValueError), match=expected), init_group(timeout_s=seconds):
        pass


@pytest.mark.parametrize("seconds", [np.int64(60), np.float32(60), np.float64(60)])
def test_a_time_limit_of_numpy_is_a_number(seconds):
    assert type(Group(timeout_s=seconds).timeout_s) is float
    with init_group(timeout_s=seconds) as group:
        assert group.timeout_s == 60
        assert type(group.timeout_s) is float


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"RANK": "5"}, "RANK=5 with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "RANK=0 with WORLD_SIZE=0"),
        ({"RANK": "x"}, "the environment variable RANK is 'x'"),
        ({"MASTER_PORT": "x"}, "the environment variable MASTER_PORT is 'x'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"LOCAL_WORLD_SIZE": "x"}, "the environment variable LOCAL_WORLD_SIZE is 'x'"),
    ],
)
def test_an_invalid_environment_is_an_error_at_once(monkeypatch, changed, expected):
    for name, value in (LAUNCHED | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{expected}.*\n\nhint: "), init_group("auto"):
        pass


def test_an_optimizer_without_a_group_rejects_an_invalid_environment(monkeypatch):
    for name, value in (LAUNCHED | {"WORLD_SIZE": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^the environment variable WORLD_SIZE is 'x'\n\nhint: "):
        current_group()


def test_a_nested_call_names_the_remedy(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"initialized already\n\nhint: .*current_group"):
        init_group().__enter__()
