"""Packed weights cut into another number of NUMA parts.

    report = reshard(Request(Path("out-1"), Path("out-2"), numa=2))
"""

from ktconv.conversion.run import Report
from ktconv.repack.reshard import Preflight, Request, prepare, reshard

__all__ = ["Preflight", "Report", "Request", "prepare", "reshard"]
