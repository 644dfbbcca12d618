"""What an output consists of: names, shapes and files, one module or package per format."""
