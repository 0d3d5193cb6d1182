"""`python -m batchmla` is the command line."""

from batchmla.cli import main

if __name__ == "__main__":
    main()
