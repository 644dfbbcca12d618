"""Reading LoRA adapters, and adding them to the weights of a source while these are read."""
