"""Classes of nodes with GraphSAGE on DGL, by two processes that share the seeds and the gradients.

torchrun --nproc-per-node 2 examples/dgl_multi.py amazon_photo.npz
"""

import time
from statistics import median

from gcnzc.interop.dgl import DataLoader, import_dgl

dgl = import_dgl()
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.nn import SAGEConv
from read_npz import option, read
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SAGE(nn.Module):
    """Two layers of the mean of the neighbours."""

    def __init__(self, num_features, num_hidden, num_classes):
        super().__init__()
        self.layers = nn.ModuleList(
            [SAGEConv(num_features, num_hidden, "mean"), SAGEConv(num_hidden, num_classes, "mean")]
        )

    def forward(self, blocks, x):
        """Logits of the last block's destinations."""
        x = F.dropout(self.layers[0](blocks[0], x).relu(), 0.5, self.training)
        return self.layers[1](blocks[1], x)


def main():
    """Train as one of the processes; the first one prints what came of it."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(option("seed", 0))
    edges, features, labels, split = read()
    graph = dgl.graph((edges[0], edges[1]), num_nodes=len(labels))
    graph.ndata["feat"], graph.ndata["label"] = features, labels

    sampler = dgl.dataloading.NeighborSampler(
        [10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DataLoader(
        graph, split["train"], sampler, device=device, use_ddp=True, batch_size=256, shuffle=True
    )

    model = SAGE(features.shape[1], 128, int(labels.max()) + 1).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 10)):
        model.train()
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for _, _, blocks in loader:
            waited_s += time.perf_counter() - began_s
            logits = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(logits, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            graph, features = graph.to(device), features.to(device)
            guesses = model.module([graph] * 2, features).argmax(dim=1).cpu()
        accuracy = (guesses == labels)[split["test"]].float().mean()
        print(f"accuracy {accuracy:.4f}")
        print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")
    del model  # otherwise over gloo its destructor may hang
    dist.destroy_process_group()


main()
