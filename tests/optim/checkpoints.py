"""Optimizers saved by torch.distributed.checkpoint, copied and pickled, on two processes."""

import copy
import pickle
from functools import partial

import torch
from optim.kinds import KINDS
from optim.local import gradients_of
from optim.models import Everything, batches
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gcnzc.exchange import init_group

# in the middle of windows of local steps, and with exchanges that go on
SAVED, END = 6, 10
# of `get_optimizer_state_dict`
OPTIONS = (
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
)
# one of each kind of state
COPIED = (
    "averaged sign",
    "onebit-adam",
    "zero-one-adam local steps",
    "streaming-diloco",
    "co2",
)


def trained_model():
    """Whose trained parameters all have gradients: torch saves no state of one without."""
    model = Everything().float()
    model.unused.requires_grad_(False)
    return model


def train(model, optimizer, begin, end):
    for rows in batches(end)[begin:]:
        gradients_of(model, optimizer, rows)
        optimizer.step()


def bits_of(model, optimizer):
    """All that a step may change on this rank, as text with all digits."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    return repr(_plain([parameters, optimizer.snapshot()]))


def _plain(value):
    """Lists of numbers in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return sorted((str(name), _plain(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def errors_of(optimizer):
    return _plain(optimizer.snapshot().get("errors", {}))


def save_and_load(folder):
    """Whether this rank goes on bit for bit, and its errors at the checkpoint and after loading."""
    found = {}
    with init_group(timeout_s=60) as group:
        for number, (name, make) in enumerate(KINDS.items()):
            model = trained_model()
            optimizer = make(model, group)
            train(model, optimizer, 0, SAVED)
            place = folder / str(number)
            state = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            checkpoint.save(state, checkpoint_id=place)
            saved = errors_of(optimizer)

            again = trained_model()
            other = make(again, group)
            template = {
                "model": again.state_dict(),
                "optimizer": get_optimizer_state_dict(again, other),
            }
            checkpoint.load(template, checkpoint_id=place)
            again.load_state_dict(template["model"])
            set_optimizer_state_dict(again, other, template["optimizer"])
            loaded = errors_of(other)
            train(model, optimizer, SAVED, END)
            train(again, other, SAVED, END)
            # the extras of exchanges that go on are not those of the run that was saved
            optimizer.finalize()
            other.finalize()
            found[name] = bits_of(model, optimizer) == bits_of(again, other), saved, loaded
    return found


def copy_and_pickle():
    """For each optimizer, whether a copy and an unpickled one go on as it does."""
    found = {}
    with init_group(timeout_s=60) as group:
        for name in COPIED:
            model = Everything().float()
            optimizer = KINDS[name](model, group)
            torch.optim.lr_scheduler.StepLR(optimizer, 100)
            train(model, optimizer, 0, SAVED)
            pairs = [
                (model, optimizer),
                copy.deepcopy((model, optimizer)),
                pickle.loads(pickle.dumps((model, optimizer))),
            ]
            for pair in pairs:
                train(*pair, SAVED, END)
            first, *others = (bits_of(*pair) for pair in pairs)
            found[name] = [first == other for other in others]
            pairs[2][1].group.close()
    return found


def outcome_of(call, **options):
    """The message of the error that a call raises, or "works"."""
    try:
        call(**options)
    except (ValueError, checkpoint.CheckpointException) as error:
        return str(error)
    return "works"


def try_options_of_states(folder):
    """What the options of `get_optimizer_state_dict` lead to: an error's message, or "works".

    Saves the states of all optimizers to `folder`, also as one file for each rank.
    """
    found = {}
    with init_group(timeout_s=60) as group:
        for number, (name, make) in enumerate(KINDS.items()):
            model = trained_model()
            optimizer = make(model, group)
            train(model, optimizer, 0, SAVED)
            for options in OPTIONS:
                chosen = StateDictOptions(**options)
                # read without the options
                state = get_optimizer_state_dict(model, optimizer)
                calls = {
                    "get": partial(get_optimizer_state_dict, model, optimizer),
                    "set": partial(set_optimizer_state_dict, model, optimizer, state),
                }
                for what, call in calls.items():
                    found[(name, *options, what)] = outcome_of(call, options=chosen)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            checkpoint.save(state, checkpoint_id=folder / str(number))
            torch.save(optimizer.state_dict(), folder / f"{number} of {group.rank}")
    return found


def load_on_other_ranks(folder):
    """For each optimizer, the error of loading another number of ranks' states, or "works"."""
    found = {}
    with init_group(timeout_s=60) as group:
        for number, (name, make) in enumerate(KINDS.items()):
            model = trained_model()
            optimizer = make(model, group)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            found[name] = outcome_of(
                checkpoint.load, state_dict=state, checkpoint_id=folder / str(number)
            )
    return found
