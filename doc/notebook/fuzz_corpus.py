"""Packs the corpus of a fuzz target into one file of tests/fuzz/corpus, and unpacks it.

    python3 doc/notebook/fuzz_corpus.py pack FOLDER tests/fuzz/corpus/TARGET.gz
    python3 doc/notebook/fuzz_corpus.py unpack tests/fuzz/corpus/TARGET.gz FOLDER

A packed corpus is gzip over its files, each behind its length in four bytes, the least one first. Of a large corpus the
smallest files are kept, up to MOST bytes before packing.
"""
import gzip
import hashlib
import pathlib
import struct
import sys

MOST = 400_000

command, source, target = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
if command == "pack":
    files = sorted((path.read_bytes() for path in source.iterdir()), key=lambda content: (len(content), content))
    total, kept = 0, b""
    for content in files:
        total += len(content) + 4
        if total > MOST:
            break
        kept += struct.pack("<I", len(content)) + content
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(kept, 9, mtime=0))
    print(f"{len(files)} files, {total} bytes; {target.stat().st_size} bytes in {target}")
else:
    target.mkdir(parents=True, exist_ok=True)
    rest = gzip.decompress(source.read_bytes())
    while rest:
        (length,) = struct.unpack("<I", rest[:4])
        content, rest = rest[4 : 4 + length], rest[4 + length :]
        (target / hashlib.sha1(content).hexdigest()).write_bytes(content)
