"""Doors to other graph libraries, each imported on use."""
