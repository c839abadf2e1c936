"""`python -m longspec.regenerate`: a target answers prompts, or writes whole conversations, as training text."""

from longspec.inference.regenerate_command import main

if __name__ == "__main__":
    main()
