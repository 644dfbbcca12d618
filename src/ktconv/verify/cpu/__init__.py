"""`ktconv verify` of expert weights for CPUs: packed for KTransformers, by whatever tool."""
