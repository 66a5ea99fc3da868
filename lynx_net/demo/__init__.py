"""The demonstration: two processes, one KV cache, four transfers (Lynx, table 1) on a real model.

`python -m lynx_net demo` is the decode process. It starts the prefill process as its child, asks it
for the cache of one prompt as bf16, int8, int4 and lynx, decodes from each, and compares.
"""
