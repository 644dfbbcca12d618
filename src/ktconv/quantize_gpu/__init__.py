"""Experts for GPUs: W4A16 and W8A16 in the compressed-tensors format, through llm-compressor.

`scheme`, `names` and `classes` say what is written, `target` and `config` how a checkpoint of it
looks, `decode` and `matrices` how one matrix is read and written. `rtn` rounds to nearest, `gptq`
with calibration; `run` is the job. Nothing here imports torch before a run begins.
"""
