"""Reads the events of a run with TensorBoard's own reader, and compares them with metrics.jsonl.

    pip install tensorboard && python doc/notebook/tensorboard_check.py runs/mine
"""
import json
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = Path(sys.argv[1])
events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
found = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
compared = 0
for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
    kind = "eval" if "eval_loss" in line else "train"
    for key, value in line.items():
        if key == "step" or not isinstance(value, (int, float)):
            continue
        (as_f32,) = struct.unpack("f", struct.pack("f", value))
        assert found[f"{kind}/{key.removeprefix('eval_')}", line["step"]] == as_f32, (key, line)
        compared += 1
assert compared == len(found), (compared, len(found))
print(f"TensorBoard reads {compared} figures, equal to those of metrics.jsonl")
