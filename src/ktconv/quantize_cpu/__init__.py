"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))
"""

from ktconv.quantize_cpu.run import Preflight, Request, prepare, quantize_cpu

__all__ = ["Preflight", "Request", "prepare", "quantize_cpu"]
