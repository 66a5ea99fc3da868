"""Two servers: one computes KV caches, the other answers clients of OpenAI's API from them while they arrive.

    lynx-net prefill-server     computes the cache of a prompt and sends it over lynx_net (`prefill_app`, `prefill`)
    lynx-net decode-server      /v1/completions, /v1/chat/completions, /v1/models (`decode_app`, `engine`)

The decode server asks the prefill server over HTTP: these tokens, under this request id, to that address. The
cache comes over lynx_net, and decoding begins on its anchors. docs/http.md is the walk from nothing to a streamed
answer; examples/http_prefill.py and examples/http_decode.py are the same idea in a hundred lines each.

The layers, from the bottom:

    errors, config, shapes, answers, wire     what requests, answers and settings look like; no server
    text, bus, metrics, trace, logs           tokens to text; what happens to requests, for whoever watches
    pages, notify                             the page at / with its files in page/; a word to the service manager
    steps, admission                          who may compute, and who may begin
    models, links, engine, prefill_engine     one request from its beginning to its end; these import torch
    generation, exchange, watching, serving   the text of an answer, its way back, what both servers share
    decode_app, prefill_app, cli              the two applications

Needs the extras `http` and `torch`; importing this package alone needs neither.
"""
