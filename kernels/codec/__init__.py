"""Codes of updates: signs and low-precision blocks, packed for the network."""
