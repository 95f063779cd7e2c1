"""Let idle OpenMP threads of a command sleep instead of spin; import this before torch.

Spinning threads take the cores from loading threads, other runs and the other workers, so that the
parallel sections of torch wait for threads that have no core.
"""

import os

# variables by which users choose this themselves, of GNU's and of Intel's and LLVM's OpenMP
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

if not any(name in os.environ for name in CHOICES):
    os.environ["OMP_WAIT_POLICY"] = "passive"
