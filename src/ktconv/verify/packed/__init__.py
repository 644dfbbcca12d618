"""`ktconv verify` of experts for CPUs, packed for KTransformers by ktconv or other tools."""
