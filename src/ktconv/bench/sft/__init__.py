"""`ktconv bench --mode sft`: forward and backward of experts with LoRA, in turn with other
implementations, and the errors of every gradient."""
