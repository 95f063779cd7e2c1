"""`python -m gcnzc` is the `gcnzc` command."""

import sys

from gcnzc.cli import main

sys.exit(main())
