"""Makes the Parquet and Arrow files of this folder, as pyarrow 26 writes them: one Parquet table in each compression, and each
table as a stream (.arrow) or in the file format (.feather).

    pip install pyarrow
    python3 make_tables.py
"""
import pathlib

import pyarrow
import pyarrow.feather
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
    path = folder / name
    if name in ("messages", "alpaca"):
        # Arrow has more types of text and of lists than Parquet.
        if name == "alpaca":
            inputs = columns["input"].dictionary_encode()
            table = table.set_column(1, "input", inputs).set_column(2, "output", columns["output"].cast(pyarrow.large_string()))
            table = table.append_column("numbers", pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)))
        with pyarrow.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
            stream.write_table(table)
        table = pyarrow.table(columns)
    else:
        pyarrow.feather.write_feather(table, path.with_suffix(".feather"), compression="uncompressed", chunksize=400)
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), compression=compression, row_group_size=400)
documents = pyarrow.table(tables[("documents", "lz4")])
pyarrow.feather.write_feather(documents, folder / "zstd.feather", compression="zstd", chunksize=400)
small = pyarrow.table(tables[("completion", "brotli")])
for codec in ("zstd", "lz4"):
    pyarrow.feather.write_feather(small, folder / f"completion_{codec}.feather", compression=codec)
# The default is LZ4.
pyarrow.feather.write_feather(documents, folder / "lz4.feather", chunksize=400)
# Some 20 KB that stand for 200 MiB.
pyarrow.feather.write_feather(pyarrow.table({"text": ["a" * (200 << 20)]}), folder / "inflated.feather", compression="zstd")
# A column of bytes that nobody asks for, and one that the format of the rows needs.
beside = pyarrow.table({"text": ["a", "b"], "id": pyarrow.array([b"1", b"2"])})
pyarrow.parquet.write_table(beside, folder / "bytes_beside.parquet", compression="snappy")
pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"a"])}), folder / "bytes.parquet", compression="snappy")


def stream(name, table):
    with pyarrow.ipc.new_stream(folder / f"{name}.arrow", table.schema) as out:
        out.write_table(table)


# A few bytes that stand for 400 million values, and some KiB that stand for 160 MiB of text.
nulls = pyarrow.nulls(400_000_000)
many = pyarrow.FixedSizeListArray.from_arrays(nulls, 400_000_000)
stream("many_values", pyarrow.table({"text": ["a"], "more": many}))
codes = pyarrow.array([0] * 20_000, pyarrow.int8())
texts = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(["x" * 8192]))
stream("much_text", pyarrow.table({"text": ["a"], "more": pyarrow.ListArray.from_arrays([0, 20_000], texts)}))
stream("dated", pyarrow.table({"text": ["a", "b"], "made": pyarrow.array([1, 2], pyarrow.timestamp("s"))}))
stream("twice", pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]))

# The third row has no text.
broken = pyarrow.table({"text": ["a", "b", None, "d"]})
pyarrow.parquet.write_table(broken, folder / "broken_row.parquet", compression="snappy", row_group_size=2)
pyarrow.feather.write_feather(broken, folder / "broken_row.feather", compression="uncompressed", chunksize=2)

# Two calls with other arguments: in a table, each has the arguments of both.
place = pyarrow.struct([("city", pyarrow.string()), ("street", pyarrow.string())])
call = pyarrow.struct([("function", pyarrow.struct([("name", pyarrow.string()), ("arguments", place)]))])
caller = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("tool_calls", pyarrow.list_(call))])
asked = [[{"role": "user", "content": "Where?"}, {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": place}}]}]
         for place in ({"city": "Rome"}, {"street": "Via Appia"})]
calls = pyarrow.table({"messages": pyarrow.array(asked, pyarrow.list_(caller))})
stream("calls", calls)
pyarrow.parquet.write_table(calls, folder / "calls.parquet", compression="snappy")
