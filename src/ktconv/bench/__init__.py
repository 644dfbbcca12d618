"""`ktconv bench`: MoE kernels measured against the machine's own limits."""
