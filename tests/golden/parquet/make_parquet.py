"""Makes the Parquet files of this folder, as pyarrow 26 writes them: one table in each compression.

    pip install pyarrow
    python3 make_parquet.py
"""
import pathlib

import pyarrow
import pyarrow.parquet

folder = pathlib.Path(__file__).parent
turn = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
said = pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())])
messages = [
    [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am tiny."}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "你好"}, {"role": "assistant", "content": "好"}],
]
conversations = [[{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "I am tiny."}]] * 2
tables = {
    ("messages", "zstd"): {"id": pyarrow.array([7, 8]), "messages": pyarrow.array(messages, pyarrow.list_(turn))},
    ("sharegpt", "snappy"): {"conversations": pyarrow.array(conversations, pyarrow.list_(said)), "tools": pyarrow.array([None, ""])},
    ("alpaca", "gzip"): {
        "instruction": pyarrow.array(["Who are you?", "Add."]),
        "input": pyarrow.array([None, "1 and 2"]),
        "output": pyarrow.array(["I am tiny.", "3"]),
    },
    ("completion", "brotli"): {"prompt": pyarrow.array(["Who are you?"]), "completion": pyarrow.array(["I am tiny."])},
    ("documents", "lz4"): {"text": pyarrow.array([f"Text number {i}." for i in range(1000)])},
    ("nothing_known", "none"): {"question": pyarrow.array(["a"]), "reply": pyarrow.array(["b"])},
}
for (name, compression), columns in tables.items():
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet", compression=compression, row_group_size=400)
