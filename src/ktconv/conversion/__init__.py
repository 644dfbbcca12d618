"""What all conversions share: planning every byte, then writing it, resumable.

plan = plan_checkpoint(checkpoint, target)      # plan: a `Target` says what experts become
SomeConversion(preflight, observer).run()         # run: which tasks write them
"""

from ktconv.conversion.pipeline import Observer, Task
from ktconv.conversion.plan import Plan, Selection, Unit, plan_checkpoint
from ktconv.conversion.records import describe_units, peak_rss
from ktconv.conversion.run import (
    MANIFEST_EXPANSION,
    MEMORY_MARGIN,
    Conversion,
    Preflight,
    Report,
    Request,
    SilentObserver,
    check_output,
    disk_needed,
    fit_memory,
    fit_threads,
    refuse_nested,
)
from ktconv.conversion.target import Options, Target

__all__ = [
    "MANIFEST_EXPANSION",
    "MEMORY_MARGIN",
    "Conversion",
    "Observer",
    "Options",
    "Plan",
    "Preflight",
    "Report",
    "Request",
    "Selection",
    "SilentObserver",
    "Target",
    "Task",
    "Unit",
    "check_output",
    "describe_units",
    "disk_needed",
    "fit_memory",
    "fit_threads",
    "peak_rss",
    "plan_checkpoint",
    "refuse_nested",
]
