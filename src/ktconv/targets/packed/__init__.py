"""Outputs opened again: packed expert weights of a directory, their check, their inspection."""

from ktconv.targets.packed.weights import PackedWeights, open_packed

__all__ = ["PackedWeights", "open_packed"]
