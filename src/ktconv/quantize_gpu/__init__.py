"""Experts for GPUs: W4A16 and W8A16 in the compressed-tensors format, through llm-compressor.

`run` is the job, `rtn` rounds to nearest, `gptq` with calibration, and both build on `common`.
`matrices` writes one matrix and compares it with its source; `targets.pack_quantized` defines the
output. Nothing here imports torch before a run begins.
"""
