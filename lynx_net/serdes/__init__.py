"""Joins codecs and transport: caches in, streams on the wire, caches out."""
