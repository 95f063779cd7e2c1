"""Reports: what commands measured, as tables and figures."""
