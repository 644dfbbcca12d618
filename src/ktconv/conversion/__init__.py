"""The base of all conversions: planning every byte, then writing it, resumable.

`target` says what experts become, `plan` which bytes that are, and `run` is one run: `output`
compares what is there with the plan, `pipeline` runs `tasks`, `records` are for the manifest.
"""
