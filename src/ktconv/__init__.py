"""ktconv: Mixture-of-Experts checkpoints into CPU expert weights, provably right."""

__version__ = "0.1.0"
