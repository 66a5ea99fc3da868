"""lynx_net beside the systems and codecs of others, each in an environment of its own that a script builds.

Processes of these environments import this package: it imports nothing that they may not have.
"""
