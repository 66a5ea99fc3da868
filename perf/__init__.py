"""Benchmarks that anyone can run; each module is one `python -m perf.NAME`."""
