"""`python -m ktconv`."""

import sys

if __name__ == "__main__":
    # The working directory, which may be a checkpoint with a numpy.py in it.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)

    from ktconv.cli.entry import main

    main()
