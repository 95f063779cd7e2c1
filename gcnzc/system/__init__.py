"""What Linux, the CUDA driver and files provide."""
