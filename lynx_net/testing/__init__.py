"""Tools for testing this library and code built on it: virtual time, a faulty relay, the suite for transports."""
