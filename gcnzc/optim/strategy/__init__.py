"""Strategies: when and with whom ranks exchange, what they exchange, and how it is applied."""
