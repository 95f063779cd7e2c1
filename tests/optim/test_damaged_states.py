"""Damaged states of strategies are rejected with the name of what is damaged, and not loaded."""

import copy

import pytest
import torch
from optim.kinds import LOCAL, local
from torch import nn

from gcnzc.compress import Sign
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import DiLoCo

KINDS = LOCAL | {"diloco sign": local(DiLoCo, compress=Sign(block=32))}


def train(model, optimizer, steps):
    yield from optimizer.broadcast_model()
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 1
        yield from optimizer.algorithm()
        # the results of overlapped exchanges are in the states
        yield from optimizer.finish_pending()


def make(name, steps):
    """The models and optimizers of two ranks."""
    torch.manual_seed(0)
    # each rank has a shard, of a multiple of 32 elements
    models = [nn.Linear(16, 8) for _ in range(2)]
    optimizers = [KINDS[name](model, Group(rank, 2)) for rank, model in enumerate(models)]
    lockstep([train(*pair, steps) for pair in zip(models, optimizers, strict=True)])
    return models, optimizers


def bits_of(model, optimizer):
    return repr([model.state_dict(), optimizer.snapshot(), optimizer.steps])


def shorten(vectors, name):
    vectors[name] = vectors[name][:-1]


def set_nan(vectors, name):
    vectors[name][0] = torch.nan


def set_text(vectors, name):
    vectors[name] = "a text"


def delete(vectors, name):
    del vectors[name]


DAMAGES = {
    shorten: r"has the shape \(\d+,\), not \(\d+,\)",
    set_nan: "has elements that are not finite",
    set_text: "is a str",
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_damaged_vector_is_rejected_by_name_and_nothing_is_loaded(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    sizes = [part.vector_sizes() for part in optimizers[1].recipe.parts]
    vectors = {"parameters"}.union(*sizes)
    found = optimizers[1].snapshot()
    places = [
        (place, each)
        for place in ("shared", "local", "shards")
        for each in found[place]
        if each in vectors
    ]
    assert {each for _, each in places} == vectors
    for place, each in places:
        for damage, message in DAMAGES.items():
            if damage is set_nan and (place == "local" or each == "next"):
                # these may have overflowed
                continue
            state = copy.deepcopy(found)
            damage(state[place], each)
            with pytest.raises(ValueError, match=rf"^{each} of the state {message}\n\nhint: "):
                others[1].load_state_dict(state)
        state = copy.deepcopy(found)
        delete(state[place], each)
        with pytest.raises(ValueError, match=r"(?s)the state .*\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(found)


def test_compression_errors_of_another_shape_are_rejected_and_nothing_is_loaded():
    _, optimizers = make("diloco sign", 6)
    models, others = make("diloco sign", 2)
    before = bits_of(models[1], others[1])
    state = copy.deepcopy(optimizers[1].snapshot())
    shorten(state["errors"]["difference"], "worker")
    with pytest.raises(ValueError, match=r"^errors of shapes .*\n\nhint: "):
        others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(optimizers[1].snapshot())


KEYS = ("inner", "shared", "local", "shards", "errors", "rank", "world_size")


@pytest.mark.parametrize("name", ["diloco", "co2"])
def test_a_state_without_a_key_is_rejected(name):
    _, optimizers = make(name, 6)
    models, others = make(name, 2)
    before = bits_of(models[1], others[1])
    places = [*((each,) for each in KEYS), ("shared", "numbers"), ("inner", "param_groups")]
    places += [("shared", "numbers", each) for each in ("steps", "since", "is_plain")]
    for *above, last in places:
        state = holder = copy.deepcopy(optimizers[1].snapshot())
        for each in above:
            holder = holder[each]
        del holder[last]
        with pytest.raises(ValueError, match=r"state .*(\n)*.*\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
