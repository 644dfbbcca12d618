"""Layer folders into safetensors shards, byte for byte what `quantize-cpu` writes.

    report = merge(Request(Path("layers"), Path("out"), source="path/to/model"))

The source is read for its other tensors, configuration and tokenizer, not for experts.
"""

from ktconv import callable_module
from ktconv.conversion.run import Report
from ktconv.repack.merge import Preflight, Request, merge, prepare

__all__ = ["Preflight", "Report", "Request", "merge", "prepare"]

callable_module(__name__)
