"""`python -m perf.peers`: see `perf/peers/transport.py`."""

from perf.peers.transport import main

if __name__ == "__main__":
    main()
