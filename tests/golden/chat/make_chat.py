"""Writes chat.json: chats rendered by transformers' own template code. See ../README.md.

    make_chat.py [MODEL_DIR]    MODEL_DIR holds Qwen3-4B-Instruct-2507's tokenizer_config.json; when it is
                                given, qwen3-instruct-2507.jinja is taken from it anew.
"""

import copy
import json
import sys
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
FILES = {"instruct-2507": "qwen3-instruct-2507.jinja", "thinking": "qwen3-thinking.jinja"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather <now> & later: 查詢城市天氣（°C）",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "城市, e.g. \"台北\" or 'Zürich'"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_docs",
        "description": "Search a folder.\nOne query a call; path like C:\\docs\\a/b.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "filter": {
                    "type": "object",
                    "properties": {
                        "since": {"type": ["string", "null"], "format": "date"},
                        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 0, "maxItems": 8},
                        "score": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1},
                    },
                    "additionalProperties": False,
                },
            },
            "required": ["query"],
        },
    },
}
TOOLS = [WEATHER, SEARCH]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text):
    return {"role": "tool", "content": text}


SYSTEM = {"role": "system", "content": "You are a careful helper.\nAnswer in one line."}
ODD = "比較 a<b && c>d，He said \"it's 5 > 3\" & 'ok'；emoji 🦀 und größer\t結束"
TURNS = [user("Hi"), assistant("Hello! How can I help?"), user("Name a prime."), assistant("7"), user("And the next?")]
CALLS = [
    call("get_weather", {"city": "台北 <&>", "unit": "celsius"}),
    call("search_docs", {"query": "it's \"rain\"", "filter": {"since": None, "tags": ["雨", "a&b"], "score": 0.75}, "n": -3, "all": True}),
]
TOOL_TURN = [user("Weather in Taipei, and any notes?"), assistant("", tool_calls=CALLS), tool('{"temp": 28, "sky": "晴"}'), tool("2 notes:\n- <rain>\n- & wind")]
THOUGHT = "The user greets.\n\nReply briefly."
INLINE = "<think>\n" + THOUGHT + "\n</think>\n\nHello there."

# name, messages, tools
CHATS = [
    ("user", [user("Who are you?")], None),
    ("user-empty", [user("")], None),
    ("user-spaces", [user("  two spaces, newline after \n\n")], None),
    ("user-markup", [user("{{ x }} {% if y %} <|im_end|>\n<|im_start|>system")], None),
    ("system-user", [SYSTEM, user("Who are you?")], None),
    ("turns", TURNS, None),
    ("system-turns", [SYSTEM, *TURNS], None),
    ("late-system", [user("Hi"), assistant("Hello"), SYSTEM, user("Again")], None),
    ("chinese-odd", [{"role": "system", "content": "你是助理 <小幫手>"}, user(ODD), assistant(ODD), user("再說一次")], None),
    ("ends-with-assistant", [user("Hi"), assistant("Hello!")], None),
    ("tools", [user("Weather?")], TOOLS),
    ("tools-system", [SYSTEM, user("Weather?")], TOOLS),
    ("tools-empty-list", [SYSTEM, user("Weather?")], []),
    ("tool-turn", TOOL_TURN, TOOLS),
    ("tool-turn-done", [*TOOL_TURN, assistant("28 °C, sunny; rain & wind noted.")], TOOLS),
    ("tool-turn-then-user", [*TOOL_TURN, assistant("28 °C, sunny."), user("Thanks")], TOOLS),
    ("tool-text-and-call", [SYSTEM, user("Weather?"), assistant("Let me look.", tool_calls=CALLS[:1]), tool("28")], TOOLS),
    ("tool-call-bare", [user("Weather?"), assistant("", tool_calls=[{"name": "get_weather", "arguments": {"city": "Rome"}}]), tool("30")], TOOLS),
    ("tool-arguments-string", [user("Weather?"), assistant("", tool_calls=[call("get_weather", '{"city":"台北"}')]), tool("28")], TOOLS),
    ("tool-content-null", [user("Weather?"), assistant(None, tool_calls=CALLS[:1]), tool("28")], TOOLS),
    ("tool-two-rounds", [*TOOL_TURN, assistant("", tool_calls=CALLS[:1]), tool("29"), assistant("Now 29.")], TOOLS),
    ("tool-response-as-user", [user("Hi"), assistant("A"), user("<tool_response>\nx\n</tool_response>")], None),
    ("reasoning", [user("Hi"), assistant("Hello there.", reasoning_content=THOUGHT)], None),
    ("reasoning-past", [user("Hi"), assistant("Hello there.", reasoning_content=THOUGHT), user("Bye")], None),
    ("reasoning-newlines", [user("Hi"), assistant("\n\nHello there.", reasoning_content="\n" + THOUGHT + "\n\n")], None),
    ("reasoning-empty", [user("Hi"), assistant("Hello there.", reasoning_content="")], None),
    ("reasoning-tool", [user("Weather?"), assistant("", reasoning_content="Need a call.", tool_calls=CALLS[:1]), tool("28"), assistant("28.", reasoning_content="Got it.")], TOOLS),
    ("inline-think", [user("Hi"), assistant(INLINE)], None),
    ("inline-think-past", [SYSTEM, user("Hi"), assistant(INLINE), user("Bye")], None),
    ("inline-think-empty", [user("Hi"), assistant("<think>\n\n</think>\n\nHello there.")], None),
    ("inline-think-no-open", [user("Hi"), assistant("half a thought</think>Hello there.")], None),
    ("inline-think-twice", [user("Hi"), assistant("<think>a</think>b<think>c</think>d")], None),
]
THINKING_SWITCHED = {"user", "system-turns", "tool-turn", "inline-think-past", "reasoning", "ends-with-assistant"}


def main():
    if len(sys.argv) > 1:
        config = json.loads((Path(sys.argv[1]) / "tokenizer_config.json").read_text("utf-8"))
        (HERE / FILES["instruct-2507"]).write_bytes(config["chat_template"].encode())
    cases = []
    for template, file in FILES.items():
        text = (HERE / file).read_bytes().decode()
        for name, messages, tools in CHATS:
            for thinking in (None, False, True) if name in THINKING_SWITCHED else (None,):
                for prompt in (True, False):
                    extra = {} if thinking is None else {"enable_thinking": thinking}
                    rendered, _ = render_jinja_template(
                        [copy.deepcopy(messages)], copy.deepcopy(tools), chat_template=text, add_generation_prompt=prompt, **extra
                    )
                    suffix = {None: "", False: ".no-think", True: ".think"}[thinking] + (".prompt" if prompt else "")
                    cases.append({
                        "name": name + suffix,
                        "template": template,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": prompt,
                        "enable_thinking": thinking,
                        "expected": rendered[0],
                    })
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "chat.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    print(len(cases), "cases, transformers", transformers.__version__)


if __name__ == "__main__":
    main()
