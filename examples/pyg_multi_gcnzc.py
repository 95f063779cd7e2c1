"""Classes of nodes with GraphSAGE on PyG, by two processes that share the seeds and the gradients.

torchrun --nproc-per-node 2 examples/pyg_multi.py amazon_photo.npz
"""

import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from read_npz import option, read
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from gcnzc.interop.pyg import NeighborLoader
from torch_geometric.nn import GraphSAGE


def main():
    """Train as one of the processes; the first one prints what came of it."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(option("seed", 0))
    edges, features, labels, split = read()
    data = Data(x=features, edge_index=edges, y=labels)

    mine = split["train"].tensor_split(world_size)[rank]
    loader = NeighborLoader(
        data, [5, 10], input_nodes=mine, batch_size=256, shuffle=True, drop_last=True
    )

    model = GraphSAGE(features.shape[1], 128, 2, int(labels.max()) + 1, dropout=0.5).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 10)):
        model.train()
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for batch in loader:
            waited_s += time.perf_counter() - began_s
            batch = batch.to(device)
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(logits, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            guesses = model.module(data.x.to(device), data.edge_index.to(device)).argmax(dim=1)
        accuracy = (guesses.cpu() == labels)[split["test"]].float().mean()
        print(f"accuracy {accuracy:.4f}")
        print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")
    del model  # otherwise over gloo its destructor may hang
    dist.destroy_process_group()


main()
