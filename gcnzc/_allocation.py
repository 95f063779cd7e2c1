"""Ask torch for memory in huge pages; imported before torch.

A training step on the CPU allocates and frees hundreds of megabytes. In pages of 4 KiB each of them
is first touched through the kernel; in pages of 2 MiB a GraphSAGE step on one thread takes two
thirds of the time. `THP_MEM_ALLOC_ENABLE=0` in the environment says otherwise, and a torch that was
imported before keeps its ways.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
