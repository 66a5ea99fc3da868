"""The evaluation: every figure of the paper and some more, from one command (`python -m perf.report`)."""
