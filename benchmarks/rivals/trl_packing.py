"""Run TRL's best-fit decreasing packer: for each line of JSON with lengths, print a line with its time and bins.

Runs in the virtual environment of `trl_requirements.txt`. Every sequence has the columns `input_ids`, `completion_mask` and
`logprobs` if `columns` is true, which are packed too; else one byte a token.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pyarrow as pa
from trl.data_utils import _pack_bfd


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        lengths = np.array(asked["lengths"])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        types = {"input_ids": np.int32, "completion_mask": np.int8, "logprobs": np.float32}
        columns = types if asked["columns"] else {"completion_mask": np.int8}
        table = pa.table({name: pa.LargeListArray.from_arrays(offsets, owner.astype(dtype)) for name, dtype in columns.items()})
        started = time.process_time()
        packed = _pack_bfd(table, asked["capacity"])
        ms = 1e3 * (time.process_time() - started)
        print(json.dumps({"ms": ms, "bins": packed["seq_lengths"].to_pylist()}), flush=True)


if __name__ == "__main__":
    main()
