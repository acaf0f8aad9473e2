"""Show that llama-server goes on from another prompt's state.

    python llamacpp_stale_checkpoint.py SERVER MODEL.gguf [OPTIONS]

Any model with recurrent layers and a vocabulary of 100 tokens or more; options are the server's.
One client sends one request at a time. For prompts P of several lengths, each with its own server:

  P + 4 tokens             the server keeps the state after P
  P + [x] + 4 tokens       and the state after P + [x]
  P + [y] + 600 tokens     goes on after P; the state after P + [x] stays, though x is gone
  P + [y] + 2 of these + 1 is continued from the state after P + [x]
"""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

server, model, *options = sys.argv[1:]


def complete(url, prompt, n, **more):
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "return_tokens": True,
        "n_probs": 1,
        **more,
    }
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    return json.loads(urllib.request.urlopen(request, timeout=300).read())


def address(process, log):
    while not (found := re.search(r"listening on (http\S+)", log.read())):
        if process.poll() is not None:
            sys.exit("llama-server does not start")
        time.sleep(0.05)
        log.seek(0)
    return found[1]


def answers(length, log):
    """With a cache and without, behind a P of this length."""
    command = [server, "-m", model, "--port", "0", "-c", "4096", "-np", "1", "-t", "1", *options]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url, rng, x, y = address(process, log), random.Random(5), 3, 4
        stem, tail = ([rng.randrange(5, 100) for _ in range(many)] for many in (length, 600))
        if stem:
            complete(url, stem + tail[-4:], 1)
        complete(url, [*stem, x, *tail[-8:-4]], 1)
        complete(url, [*stem, y, *tail], 1)
        branch = [*stem, y, *tail[:2], 2]
        return complete(url, branch, 8), complete(url, branch, 8, cache_prompt=False)
    finally:
        process.kill()
        process.wait()


def is_wrong(length):
    with tempfile.TemporaryFile("a+") as log:
        warm, cold = answers(length, log)
    first, other = (one["completion_probabilities"][0]["logprob"] for one in (cold, warm))
    wrong = cold["tokens"] != warm["tokens"] or abs(first - other) > 0.01
    print(
        f"P of {length}: {'WRONG' if wrong else 'right'}; "
        f"{warm['timings']['cache_n']} tokens from the cache",
        flush=True,
    )
    print(
        f"  with    {warm['tokens']}, {other:.4f}\n  without {cold['tokens']}, {first:.4f}",
        flush=True,
    )
    return wrong


sys.exit(any([is_wrong(length) for length in (0, 1, 7, 40)]))
