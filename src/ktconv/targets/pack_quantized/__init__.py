"""Experts for GPUs: W4A16 and W8A16 as the pack-quantized format of compressed-tensors.

Nothing here imports torch or llm-compressor.
"""
