"""Contents of an output: names, shapes and files, one module or package per format."""
