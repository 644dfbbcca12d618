"""Verification of GGUF outputs."""
