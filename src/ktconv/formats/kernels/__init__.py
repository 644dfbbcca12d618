"""The byte layouts of the kernels' weights as readable NumPy: one file per family (SPEC 8)."""
