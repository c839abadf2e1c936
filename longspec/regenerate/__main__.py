"""`python -m longspec.regenerate`: training data that a target writes, answers to prompts or whole conversations."""

from longspec.regenerate.command import main

if __name__ == "__main__":
    main()
