"""Decoding on a CPU: functions written in C, which are compiled at their first use."""
