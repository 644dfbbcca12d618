"""Fine-tuning of packed experts: LoRA forward and backward (docs/fine-tuning.md)."""
