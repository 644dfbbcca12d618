"""The main job: an MoE checkpoint into quantized CPU experts, streaming and resumable.

    report = quantize_cpu(Request(model="path/to/model", output=Path("out")))
    print(report.complete, report.mean_error)

The same request continues a run that was interrupted; finished layers are kept. The code is in
`ktconv.quantize.packed`.
"""

from ktconv import callable_module
from ktconv.quantize.packed.run import Preflight, Request, prepare, quantize_cpu

__all__ = ["Preflight", "Request", "prepare", "quantize_cpu"]

callable_module(__name__)
