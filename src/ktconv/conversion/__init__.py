"""What all conversions share: planning every byte, then writing it, resumable.

plan = plan_checkpoint(checkpoint, target)      # plan: a `Target` says what experts become
SomeConversion(preflight, observer).run()         # run: which tasks write them
"""

from ktconv.conversion.output import OutputState
from ktconv.conversion.plan import Plan, Selection, Unit, plan_checkpoint
from ktconv.conversion.records import describe_units, peak_rss
from ktconv.conversion.run import (
    MANIFEST_EXPANSION,
    MEMORY_MARGIN,
    BufferedTask,
    Conversion,
    Preflight,
    Report,
    Request,
    SilentObserver,
    disk_needed,
    fit_threads,
    manifest_memory,
    refuse_nested,
)
from ktconv.conversion.target import Target

__all__ = [
    "MANIFEST_EXPANSION",
    "MEMORY_MARGIN",
    "BufferedTask",
    "Conversion",
    "OutputState",
    "Plan",
    "Preflight",
    "Report",
    "Request",
    "Selection",
    "SilentObserver",
    "Target",
    "Unit",
    "describe_units",
    "disk_needed",
    "fit_threads",
    "manifest_memory",
    "peak_rss",
    "plan_checkpoint",
    "refuse_nested",
]
