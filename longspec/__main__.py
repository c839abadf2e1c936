"""`python -m longspec`."""

from longspec.cli.app import main

if __name__ == "__main__":
    main()
