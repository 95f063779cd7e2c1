"""The error of a module whose library is not installed."""


class LibraryError(ImportError, RuntimeError):
    """A library that gcnzc does not require is missing, too old, or fails to import.

    It is an ImportError, as Python's own. Until 0.3 it is a RuntimeError too, as it was before.
    """
