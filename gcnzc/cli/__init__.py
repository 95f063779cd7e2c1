"""The `gcnzc` command: prints results as JSON on stdout, progress and messages on stderr.

The options of each command are in `gcnzc.cli.options`. An error is printed as an `error:` and a
`hint:` line, with `--debug` after its traceback. The exit status is 0, 1 after a failure, 2 if the
command line is not valid, 130 after Ctrl-C, or 143 after SIGTERM. torch is imported only after the
command line is found to be valid.
"""

import sys
import traceback
from collections.abc import Sequence

from gcnzc._version import VERSION

# before torch is imported
from gcnzc.cli import _openmp as _openmp
from gcnzc.cli.errors import DEBUG, FAILED, OutputClosed, UsageError, report
from gcnzc.cli.output import flushed_output
from gcnzc.cli.parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in given if word != DEBUG]
    is_debug = len(words) < len(given)
    if words in (["--version"], ["-V"]):
        print(f"gcnzc {VERSION}")
        return 0
    try:
        if sys.stdout is None:
            raise UsageError(
                "stdout is closed, and results are printed there\n\n"
                "hint: redirect it to a file, or by > /dev/null"
            )
        with flushed_output():  # of the help
            parsed = parse(words)
        if parsed is None:
            return 0
        from gcnzc.cli.execute import execute

        return execute(*parsed, words, is_debug=is_debug, is_process=argv is None)
    except OutputClosed:
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if is_debug:
            traceback.print_exc()
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
