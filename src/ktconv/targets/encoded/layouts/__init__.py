"""Which tensors an encoded matrix becomes, by file format."""
