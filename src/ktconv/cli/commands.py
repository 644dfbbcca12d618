"""The table of commands: their functions, and their lines in `ktconv --help`.

Reading it imports no command.
"""

from __future__ import annotations

from typing import NamedTuple

MAIN, OUTPUTS, PLANNING, MACHINE = "Main commands", "Outputs", "Planning", "This machine"

_MISMATCH = "what was written does not match its source"
_FAILED = "a check failed"

# Meanings of exit codes; 1 belongs to commands that check something.
EXIT_CODES = {
    0: "done",
    1: _FAILED,
    2: "bad usage or input",
    3: "I/O or resources",
    130: "interrupted",
}


class Row(NamedTuple):
    """One command."""

    function: str  # module:function of ktconv.cli
    panel: str  # of the list in `ktconv --help`
    summary: str  # one line of that list
    failed: str = ""  # the meaning of exit code 1; "": the command never ends with it


COMMANDS = {
    "quantize-cpu": Row(
        "quantize_cpu:quantize_cpu_command",
        MAIN,
        "Convert experts for CPUs: INT4, INT8, 12 others, or GGUF",
        _MISMATCH,
    ),
    "quantize-gpu": Row(
        "quantize_gpu:quantize_gpu_command",
        MAIN,
        "Quantize experts for GPUs, as compressed-tensors does",
        _MISMATCH,
    ),
    "merge": Row(
        "repack:merge_command",
        MAIN,
        "Merge layer folders into safetensors shards",
        _MISMATCH,
    ),
    "verify": Row(
        "verify:verify",
        MAIN,
        "Check a conversion: complete, undamaged and accurate",
        _FAILED,
    ),
    "bench": Row(
        "bench:bench",
        MAIN,
        "Measure the MoE kernels on this machine",
        "a kernel is wrong, or a row is slower than in `--compare`",
    ),
    "generate": Row("generate:generate", MAIN, "Write text with a converted model"),
    "compare": Row(
        "compare:compare",
        OUTPUTS,
        "Compare conversions: size, errors, perplexity, speed",
        _FAILED,
    ),
    "reshard": Row(
        "repack:reshard_command",
        OUTPUTS,
        "Change the number of NUMA parts of a conversion",
        _MISMATCH,
    ),
    "prune": Row(
        "prune:prune_command",
        OUTPUTS,
        "Drop the experts that matter least",
        _MISMATCH,
    ),
    "push": Row("push:push_command", OUTPUTS, "Send an output to the Hugging Face hub"),
    "inspect": Row("inspect:inspect", PLANNING, "Show what a checkpoint or an output contains"),
    "plan": Row("plan:plan", PLANNING, "Plan which GPUs and NUMA nodes hold which experts"),
    "stats": Row("stats:stats", PLANNING, "Count how often a text's tokens choose each expert"),
    "doctor": Row("doctor:doctor", MACHINE, "Show what this machine supports"),
    "completion": Row("completion:completion", MACHINE, "Print a shell's completion script"),
}


def exit_codes(name: str = "") -> dict[int, str]:
    """The exit codes of a command with their meanings; of all commands together without a name."""
    if not name:
        return EXIT_CODES
    codes = EXIT_CODES | {1: COMMANDS[name].failed}
    return {code: meaning for code, meaning in codes.items() if meaning}
