"""Asks a running `train-cli serve` with OpenAI's own client and through its page in a browser without a window.

    pip install openai playwright        # and a Chromium, for example: apt install chromium
    train-cli fit --demo -o demo && train-cli serve -m demo --port 8123 &   # in another terminal
    python3 serve_clients.py http://127.0.0.1:8123

It ends with an error if an answer is not the one that it should be.
"""

import json
import sys

import openai
from playwright.sync_api import sync_playwright

base = sys.argv[1]
client = openai.OpenAI(base_url=base + "/v1", api_key="none")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Who are you?"}]
greedy = {"model": model, "messages": question, "temperature": 0, "max_tokens": 20}

whole = client.chat.completions.create(**greedy, n=2, logprobs=True, top_logprobs=3)
answer = whole.choices[0].message.content
assert answer == whole.choices[1].message.content and whole.choices[0].finish_reason == "stop"
assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens // 2
print("chat:", answer)

pieces = list(client.chat.completions.create(**greedy, stream=True, stream_options={"include_usage": True}))
assert answer == "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
assert pieces[-1].usage.completion_tokens * 2 == whole.usage.completion_tokens
with client.chat.completions.stream(**greedy) as stream:
    for _ in stream:
        pass
    assert stream.get_final_completion().choices[0].message.content == answer
print("streams: equal")

texts = client.completions.create(model=model, prompt=["a", "b"], max_tokens=5, logprobs=2)
assert len(texts.choices) == 2 and len(texts.choices[0].logprobs.tokens) <= 5
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
assert client.chat.completions.create(**greedy, tools=[tool]).choices[0].message.role == "assistant"

for change, expected in [
    ({"temperature": 5}, openai.BadRequestError),
    ({"model": "another"}, openai.NotFoundError),
    ({"presence_penalty": 1.0}, openai.BadRequestError),
]:
    try:
        client.chat.completions.create(**{**greedy, **change})
    except expected as error:
        print("refused:", error.body["message"])
    else:
        raise AssertionError(change)

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    # The page's policy forbids the scripts with which playwright waits.
    page = browser.new_context(bypass_csp=True).new_page()
    errors, elsewhere = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("request", lambda request: request.url.startswith(base) or elsewhere.append(request.url))
    page.goto(base)
    for turn, text in enumerate(["Who are you?", "你是誰"], 1):
        page.fill("#text", text)
        page.keyboard.press("Enter")
        done = f"document.querySelectorAll('.turn').length == {2 * turn} && !document.getElementById('send').hidden"
        page.wait_for_function(done, timeout=60_000)
    shown = [turn.inner_text() for turn in page.query_selector_all(".turn")]
    print("page:", shown)
    assert len(shown) == 4 and all(shown) and shown[2] == "你是誰"
    page.click("#reset")
    assert not page.query_selector_all(".turn") and not errors and not elsewhere, (errors, elsewhere)

    # With made-up replies: an answer that the context cuts, and then a message that is refused.
    events = [
        {"choices": [{"delta": {"content": "half"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}},
    ]
    cut = {"body": "".join(f"data: {json.dumps(event)}\n\n" for event in events), "content_type": "text/event-stream"}
    refused = {"status": 400, "json": {"error": {"message": "it is too long"}}}
    for reply, turns, figures, text in [
        (cut, ["question", "half"], "the context is full", ""),
        (refused, ["question", "half", "it is too long"], "", "question"),
    ]:
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**reply))
        page.fill("#text", "question")
        page.keyboard.press("Enter")
        page.wait_for_function("!document.getElementById('send').hidden", timeout=60_000)
        assert [turn.inner_text() for turn in page.query_selector_all(".turn")] == turns
        shown = page.inner_text("#figures")
        assert figures in shown and bool(shown) == bool(figures), shown
        assert page.input_value("#text") == text
    browser.close()
print("all as it should be")
