"""Weights of squared errors by input channel: recorded, or derived from the model itself."""
