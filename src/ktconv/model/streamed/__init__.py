"""A pass of many windows of text through a model whose weights are read once, layer by layer."""
