"""`ktconv verify` of experts for GPUs: compressed-tensors checkpoints of ktconv or other tools.

`output` opens a checkpoint, `quantization` reads config.json as engines do, `unpack` turns packed
words into numbers without compressed-tensors' code. `structure`, `weights` (with `rounding`),
`layers` and `model` are the levels; `mapping` is whether an engine can load and split the experts.
"""
