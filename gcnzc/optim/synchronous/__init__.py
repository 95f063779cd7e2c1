"""Optimizers whose ranks exchange an update at every step."""
