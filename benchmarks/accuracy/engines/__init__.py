"""Kernels of serving engines, run on what an engine would load from an output of quantize-gpu."""
