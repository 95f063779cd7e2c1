"""Optimizers whose ranks take local steps between exchanges."""
