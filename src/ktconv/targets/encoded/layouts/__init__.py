"""Tensors that an encoded matrix becomes, by file format."""
