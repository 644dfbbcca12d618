"""The bytes of a source as arrays: spans of files, matrices row by row, whole tensors."""
