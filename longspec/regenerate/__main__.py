"""`python -m longspec.regenerate`: the target answers prompts, or writes whole conversations, as training text."""

from longspec.regenerate.command import main

if __name__ == "__main__":
    main()
