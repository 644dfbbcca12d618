"""What a model family is, as data: names of its blocks, its config keys, its router."""
