"""The version of gcnzc, in one place."""

VERSION = "0.1.0"
