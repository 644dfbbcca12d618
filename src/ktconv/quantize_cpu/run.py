"""The names of `ktconv.quantize_cpu`, at the path that earlier examples import."""

from ktconv.quantize.packed.run import Preflight, Request, prepare, quantize_cpu

__all__ = ["Preflight", "Request", "prepare", "quantize_cpu"]
