"""Four processes whose even and odd ranks are groups of their own."""

import torch
from collective_sizes import executed_by
from exchange.cases import everything
from optim.local import adamw, taught, vector_of
from optim.models import Everything
from optim.replicas import values_of
from torch import distributed

from gcnzc.exchange import current_group, init_group, run
from gcnzc.optim import OneBitAdam, StreamingDiLoCo
from gcnzc.train.shared_data import first_workers, share_result

STEPS = 8
EVEN, ODD = [0, 2], [1, 3]


def model_of(members):
    """A model of float32, which differs from one subgroup to the other."""
    model = Everything().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(members[0])
    return model


def one_bit(model, group):
    return OneBitAdam(model.parameters(), lr=0.01, warmup=4, group=group)


def streaming(model, group):
    options = {"local_steps": 4, "fragments": 2, "delay": 1}
    return StreamingDiLoCo(adamw(model.parameters()), group, **options)


def share_in(group):
    """A group's first workers, the local places, and what its first worker shares."""
    value = share_result(lambda _: torch.full((3,), float(group.ranks[group.rank])), group)
    return first_workers(group), (group.local_rank, group.local_world_size), value


def train_in_subgroups():
    """What a process of four comes to, in the subgroup of its parity."""
    with init_group(timeout_s=60) as whole:
        members = ODD if whole.rank % 2 else EVEN
        group = whole.subgroup(members)
        answers = [run(everything(group.rank, group.world_size), group)]
        with executed_by("builtin"):
            answers.append(run(everything(group.rank, group.world_size), group))
        model = model_of(members)
        run(taught(model, one_bit(model, group), STEPS), group)
        values = [values_of(model)]
        # the same ranks as a process group of torch, which an optimizer does not take as it is
        made = [distributed.new_group(EVEN), distributed.new_group(ODD)]
        raw, message = made[whole.rank % 2], ""
        model = model_of(members)
        try:
            streaming(model, raw)
        except TypeError as error:
            message = str(error)
        again = current_group().subgroup(distributed.get_process_group_ranks(raw))
        optimizer = streaming(model, again)
        run(taught(model, optimizer, STEPS), again)
        optimizer.finalize()
        values.append(vector_of(model))
        again.close()
        places = [share_in(group)]
        # as if the ranks were on two machines, with one member on each
        whole.local_rank, whole.local_world_size = whole.rank % 2, 2
        places.append(share_in(whole.subgroup(members)))
        return answers, values, message, places
