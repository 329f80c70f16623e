"""Asks a running `train-cli serve` by many streams at the same time, and checks every answer.

    train-cli serve -m MODEL --port 8123 --parallel 32 --context 1024 &
    python3 doc/notebook/serve_load.py http://127.0.0.1:8123 ROWS.tsv STREAMS SECONDS [PROCESS]

Each prompt of ROWS.tsv (a prompt, a tab, an answer) is asked once alone, greedily. Then STREAMS threads ask prompts at random
for SECONDS seconds, and each answer must be the one from before. It prints how many of those answers were the rows' own,
how long the pieces of an answer were apart, and how the memory of the server (PROCESS) and of the card has grown: it is read
each second, because buffers of prompts come and go, and the most of the last tenth of the time is compared with the most of
the first. It ends with exit code 1 if an answer was wrong or a request failed.
"""
import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.parse

base, rows, streams, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
process = sys.argv[5] if len(sys.argv) > 5 else None
address = urllib.parse.urlparse(base).netloc
lines = [line.rstrip("\n").split("\t") for line in open(rows) if "\t" in line and not line.startswith("#")]
pairs = dict(line[:2] for line in lines)
pairs.pop("prompt", None)


def ask(prompt):
    """The answer, and the time of each of its pieces."""
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64, "stream": True}
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:200]}")
    text, times = "", []
    for line in response:
        if line.startswith(b"data: {"):
            piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if piece:
                text += piece
                times.append(time.perf_counter())
    connection.close()
    return text, times


def memory():
    """Bytes of the server's process, and MiB of the card, where there are any."""
    held = None
    if process:
        status = open(f"/proc/{process}/status").read()
        held = int(status.split("VmRSS:")[1].split()[0]) * 1024
    try:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return held, int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, IndexError):
        return held, None


alone = {prompt: ask(prompt)[0] for prompt in pairs}
print(f"{len(alone)} prompts; {sum(alone[p] == pairs[p] for p in alone)} answers are those of the rows", flush=True)
gaps, first, wrong, failed, answers, pieces = [], [], [], [], 0, 0
lock, end = threading.Lock(), time.time() + seconds


def client(number):
    global answers, pieces
    choose = random.Random(number)
    while time.time() < end:
        prompt, began = choose.choice(list(alone)), time.perf_counter()
        try:
            text, times = ask(prompt)
        except Exception as error:  # every kind of failure is counted
            failed.append(repr(error))
            return
        with lock:
            answers, pieces = answers + 1, pieces + len(times)
            gaps.extend(b - a for a, b in zip(times, times[1:]))
            first.extend(t - began for t in times[:1])
            if text != alone[prompt]:
                wrong.append((prompt, alone[prompt], text))


threads = [threading.Thread(target=client, args=(i,)) for i in range(streams)]
for thread in threads:
    thread.start()
readings = []
while time.time() < end:
    readings.append(memory())
    time.sleep(1)
for thread in threads:
    thread.join()
process_read, card_read = ([value for value in values if value] for values in zip(*readings))
gaps.sort()
first.sort()
at = lambda values, share: 1000 * values[min(len(values) - 1, int(share * len(values)))]
print(f"{answers} answers, {pieces} pieces, {pieces / seconds:.0f} pieces/s, {len(failed)} failed, {len(wrong)} wrong")
print(f"ms between pieces: p50 {at(gaps, 0.5):.1f}, p99 {at(gaps, 0.99):.1f}, p99.9 {at(gaps, 0.999):.1f}; "
      f"ms to the first: p50 {at(first, 0.5):.1f}, p99 {at(first, 0.99):.1f}")
for name, unit, values in [("process", 1 << 20, process_read), ("card", 1, card_read)]:
    tenths = [values[len(values) * n // 10:len(values) * (n + 1) // 10] for n in range(10)]
    most = [max(tenth) / unit for tenth in tenths if tenth]
    if most:
        print(f"most memory of the {name} in each tenth of the time, MiB: {' '.join(f'{value:.0f}' for value in most)} "
              f"({100 * (most[-1] / most[0] - 1):+.2f} %)")
for found in failed[:3] + wrong[:3]:
    print(found)
sys.exit(1 if failed or wrong else 0)
