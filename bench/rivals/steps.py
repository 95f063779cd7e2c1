"""What the programs that train share: the sizes of the models, the labels and the step."""

import torch
from torch.nn.functional import cross_entropy

KINDS = ("sage", "gcn", "gat")
# end of the names of configurations with the memory allocation of `gcnzc train`
KEPT = "freed memory kept"
LAYERS, HIDDEN, HEADS, CLASSES, DROPOUT, LEARNING_RATE = 3, 256, 4, 40, 0.5, 0.003


def labels(num_nodes):
    """Return a label for each node, (N,) int64."""
    return torch.randint(CLASSES, (num_nodes,), generator=torch.Generator().manual_seed(0))


def train(model, minibatches):
    """Train with Adam, and yield the size of each minibatch after its step.

    Args:
        model: returns logits, whose first rows are those of the seeds.
        minibatches: the arguments of the model, the labels of the seeds, and the size.
    """
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for inputs, y, size in minibatches:
        optimizer.zero_grad()
        cross_entropy(model(*inputs)[: len(y)], y).backward()
        optimizer.step()
        yield size
