"""Show that a prompt equal to a cached one ends the only generation thread of mlx_lm.server.

python mlx_server_dies.py FOLDER
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

url = "http://127.0.0.1:18790"
server = subprocess.Popen(
    [sys.executable, "-m", "mlx_lm", "server", "--model", sys.argv[1], "--port", "18790"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)


def call(path, body=None):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=60).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return repr(error)


while "ok" not in call("/health"):
    time.sleep(0.5)
words = [f"w{i}" for i in range(5, 25)]


def ask(words):
    return call("/v1/completions", {"prompt": " ".join(words), "max_tokens": 4, "temperature": 0})


print("20 words      ", ask(words)[:150])
print("the first 19  ", ask(words[:-1])[:150])
print("something else", ask(["w1", "w2"])[:150])
print("health        ", health := call("/health"))
server.kill()
sys.exit("ok" not in health)
