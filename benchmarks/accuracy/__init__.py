"""How much accuracy each way of choosing codes costs: conversions, evaluations, tables and plots.

    python -m benchmarks.accuracy --help

Run from the root of the repository. benchmarks/README.md describes the subcommands.
"""
