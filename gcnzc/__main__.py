"""The process of the `gcnzc` command, which is also `python -m gcnzc`."""

import sys


def run() -> int:
    """Run the command of this process, and return its exit status."""
    try:
        # takes seconds, in which Ctrl-C may be pressed
        from gcnzc.cli import main
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\nhint: run the command again\n")
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
