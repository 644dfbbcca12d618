"""Experts for GPUs in the compressed-tensors format: rounded to nearest, or with GPTQ.

`run` is the job. Rounding to nearest is `ktconv.quantize.encoded`; `gptq` runs the model with
calibration, through llm-compressor. Nothing here imports torch before a run begins.
"""
