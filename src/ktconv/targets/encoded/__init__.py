"""A checkpoint whose routed experts are encoded, in a format that engines load.

A format is a row of `scheme.ROWS`: a kind of number, a layout (`layouts`), what modules are called
(`naming`) and a section of config.json (`sections`). Nothing here imports torch or llm-compressor.
"""
