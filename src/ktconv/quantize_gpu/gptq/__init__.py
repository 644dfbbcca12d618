"""`--method gptq`: rounding that is calibrated on a text, layer by layer.

`run` is the job, `quantize` one call of llm-compressor; `calibration` draws samples,
`calibration_model` loads the model, `coverage` counts what experts saw, `memory` estimates, and
`selftest` tries one layer first. `run` imports torch only when it begins.
"""
