"""Choosing codes and scales: packed experts for KTransformers, encoded experts of checkpoints."""
