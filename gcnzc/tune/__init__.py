"""Settings of this machine, chosen by measurement."""
