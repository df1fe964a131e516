"""`python -m edgert` is the command `edgert`."""

from edgert.cli import main

if __name__ == "__main__":
    main()
