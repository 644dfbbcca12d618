"""`python -m ktconv`."""

from ktconv.entry import main

if __name__ == "__main__":
    main()
