"""GGUF files as checkpoints: headers, splits, and what their metadata say of the model."""
