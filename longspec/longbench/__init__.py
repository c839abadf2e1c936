"""The command that measures a method on LongBench tasks and AIME24."""
