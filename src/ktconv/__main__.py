"""`python -m ktconv`."""

from ktconv.cli import main

if __name__ == "__main__":
    main()
