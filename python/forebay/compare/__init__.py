"""What Forebay brings: the same seeded requests, put to an endpoint with and without it.

`python -m forebay.compare URL [--baseline URL]`, or `forebay-compare`. It needs the standard library alone, and no
daemon: the endpoints are OpenAI servers, such as `vllm serve`. docs/compare.md shows what it prints.
"""
