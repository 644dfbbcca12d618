"""Checkpoints with fewer experts: which stay, and what changes around them."""
