"""Packed weights cut into another number of NUMA parts.

    report = reshard(Request(Path("out-1"), Path("out-2"), numa=2))

No source is needed, unless parts are joined whose scales differ: then the error says to give one.
"""

from ktconv import callable_module
from ktconv.conversion.run import Report
from ktconv.repack.reshard import Preflight, Request, prepare, reshard

__all__ = ["Preflight", "Report", "Request", "prepare", "reshard"]

callable_module(__name__)
