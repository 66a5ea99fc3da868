"""The two processes of `perf.peers`, one module a system; each runs in an environment of its own."""
