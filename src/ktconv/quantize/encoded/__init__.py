"""Experts of a checkpoint encoded again: what quantize-cpu does for other formats than those of
KTransformers' own files, and quantize-gpu with rounding to nearest.

`conversion` is the job, `task` what becomes of one matrix, `passing` which matrices keep their
codes; `deviation` compares with the source. `targets.encoded` defines the output.
"""
