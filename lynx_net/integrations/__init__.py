"""Bridges to other packages. Each module imports its package only when it is used."""
