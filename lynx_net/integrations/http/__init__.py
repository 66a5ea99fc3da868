"""Two servers: one computes KV caches, the other answers clients of OpenAI's API from them while they arrive.

    lynx-net prefill-server     computes the cache of a prompt and sends it over lynx_net (`prefill_app`, `prefill`)
    lynx-net decode-server      /v1/completions, /v1/chat/completions, /v1/models (`decode_app`, `engine`)

The decode server asks the prefill server over HTTP: these tokens, under this request id, to that address. The cache comes
over lynx_net, and decoding begins on its anchors. docs/http.md is the walk from nothing to a streamed answer.

The layers, from the bottom: `errors`, `config`, `shapes` and `answers` (what requests and answers look like; no server),
`text` (tokens to text), `bus` (what happens to requests, for whoever watches), `steps` and `admission` (who may compute
when), `models`, `engine` and `prefill` (one request from its arrival to its end), the two applications, `cli`.

Needs the extras `http` and `torch`; importing this package alone needs neither.
"""
