"""Experts encoded in blocks of ggml."""
