"""`--algorithm gptq`: rounding that is calibrated on a text, layer by layer.

`run` is the job, `runner` what a streamed pass through the model asks, `rounding` llm-compressor's
arithmetic; `calibration` draws samples, `coverage` counts what experts saw, and `selftest` compares
the first layer. `run` imports torch only when it begins.
"""
