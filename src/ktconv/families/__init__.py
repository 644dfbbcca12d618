"""Model families as data: names of their blocks, config keys, routers."""
