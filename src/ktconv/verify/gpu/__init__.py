"""`ktconv verify` of expert weights for GPUs: compressed-tensors checkpoints, ours or others'.

`quantization` reads what config.json tells engines, `opened` what files hold, `unpack` turns
packed words into numbers without compressed-tensors' code. `structure`, `weights` (with
`rounding`), `layers` and `model` are the levels, `mapping` is whether an engine can load and
split it, `run` the job.
"""
