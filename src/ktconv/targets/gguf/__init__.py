"""Experts in GGUF files: what they contain, and the file whose other tensors they get."""
