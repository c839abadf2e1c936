"""The request engine: requests in, events out. Prefill, rounds, rows, captured rounds, plans and memory."""
