"""`python -m longspec.regenerate`: training data that a target writes, answers to prompts or whole conversations."""

from longspec.inference.regenerate_command import main

if __name__ == "__main__":
    main()
