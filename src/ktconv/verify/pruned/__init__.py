"""Verification of checkpoints with fewer experts, whose bytes are those of the source."""
