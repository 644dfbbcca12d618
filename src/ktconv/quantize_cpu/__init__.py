"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

report = quantize_cpu(Request(model="path/to/model", output=Path("out")))
"""

from ktconv.quantize_cpu.run import Outlook, Request, prepare, quantize_cpu

__all__ = ["Outlook", "Request", "prepare", "quantize_cpu"]
