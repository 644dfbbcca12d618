"""Layer folders into safetensors shards, byte for byte what `quantize-cpu` writes.

    report = merge(Request(Path("layers"), Path("out"), source="path/to/model"))

`tree` reads and judges the folders, `sources` holds them against a manifest and a source,
`planning` says what will be written, `derived` is a conversion whose source is packed weights
(`ktconv.reshard` is one too), `run` is the job itself.
"""

from __future__ import annotations

from ktconv.conversion import Report
from ktconv.merge.run import Outlook, Request, merge, prepare

__all__ = ["Outlook", "Report", "Request", "merge", "prepare"]
