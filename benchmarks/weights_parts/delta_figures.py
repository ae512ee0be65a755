"""Size and speed of our deltas of bfloat16 weights against those of others, on changes made by real training.

    cd benchmarks; python -m weights_parts.delta_figures [--images FOLDER] [--json PATH]

Sizes are of the second half of the recorded updates: Adam's first steps are all alike, and say little of a long run.
Speeds are in bytes of the model, over one update of it repeated until it exceeds the caches: by the clock with two threads, and
by the time that a core worked, which a busy machine changes less. Copying, scanning, encoding and applying take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.transport.delta.compact_codec import CHUNK_BYTES, warm_up
from async_rl.transport.delta.parallel_codec import PIECE_BYTES
from weights_parts.delta_codecs import GAPS, OURS, PARALLEL, XOR, Bits, Codec

THREADS = 2
CHUNK = CHUNK_BYTES // 2
Figures = dict[str, float]


def delta_figures(images: Path | None = None, *, mib: int = 256, rounds: int = 5) -> Figures:
    """`images`: what real_deltas.py left in a folder; None trains a policy now, which takes minutes."""
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        if images is None:
            images = Path(scratch)
            script = Path(__file__).with_name("real_deltas.py")
            subprocess.run([sys.executable, "-P", script, images], check=True, stdout=subprocess.DEVNULL)
        recorded = {float(path.stem): np.load(path) for path in sorted(images.glob("*.npy"))}
    figures: Figures = {}
    for rate, versions in recorded.items():
        figures |= {f"{name}_{rate:g}": value for name, value in sizes(versions).items()}
    slowest = min(recorded)
    figures |= {name: figures[f"{name}_{slowest:g}"] for name in ("delta_ratio_vs_full", "changed_share", "bits_per_change")}
    figures["delta_vs_best_public_codec"] = min(figures[f"delta_vs_best_public_codec_{rate:g}"] for rate in recorded)
    return figures | speeds(recorded[slowest], mib, rounds)


def sizes(versions: Bits) -> Figures:
    pairs = list(pairwise(versions))
    settled = pairs[len(pairs) // 2 :]
    # the others are best where nothing is cut to pieces
    ours, parallel, gaps, xor = (
        sum(_size(codec, old, new, chunk) for old, new in settled)
        for codec, chunk in ((OURS, CHUNK), (PARALLEL, PIECE_BYTES // 2), (GAPS, versions.shape[1]), (XOR, versions.shape[1]))
    )
    changed = sum(int(np.count_nonzero(old != new)) for old, new in settled)
    elements = sum(old.size for old, _ in settled)
    return {
        "delta_vs_best_public_codec": min(gaps, xor) / ours,
        "delta_vs_u16_gap": gaps / ours,
        "delta_vs_xor": xor / ours,
        "delta_ratio_vs_full": 2 * elements / ours,
        "changed_share": changed / elements,
        "bits_per_change": 8 * ours / changed,
        "parallel_ratio_vs_full": 2 * elements / parallel,
        "parallel_bits_per_change": 8 * parallel / changed,
    }


def _size(codec: Codec, old: Bits, new: Bits, chunk: int) -> int:
    """Encode and apply all chunks; the result must be the new image."""
    image, made = old.copy(), [codec.encode(*each) for each in _chunks(old, new, size=chunk)]
    for part, (into,) in zip(made, _chunks(image, size=chunk), strict=True):
        codec.apply(part, into)
    assert np.array_equal(image, new), codec.name
    return sum(len(part) for part in made)


def _chunks(*images: Bits, size: int = CHUNK) -> list[tuple[Bits, ...]]:
    return [tuple(each[at : at + size] for each in images) for at in range(0, images[0].size, size)]


def speeds(versions: Bits, mib: int, rounds: int) -> Figures:
    times = -(-(mib << 19) // versions.shape[1])
    old, new = (np.tile(each, times)[: mib << 19] for each in versions[-2:])
    image = np.empty_like(old)
    wall_s, core_s = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ThreadPoolExecutor(THREADS) as pool:

        def timed(name: str, work: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
            def watched(*arguments: Any) -> tuple[Any, float]:
                started = time.thread_time()
                return work(*arguments), time.thread_time() - started

            started = time.perf_counter()
            done = list(pool.map(watched, *columns))
            wall_s[name].append(time.perf_counter() - started)
            core_s[name].append(sum(spent for _, spent in done))
            return [result for result, _ in done]

        for _ in range(rounds):
            timed("copy", lambda chunk: np.copyto(*chunk), _chunks(image, old))
            timed("scan", _scan, _chunks(old, new))
            for codec, name in ((OURS, ""), (GAPS, "public_")):
                np.copyto(image, old)
                made = timed(f"{name}encode", lambda chunk, codec=codec: codec.encode(*chunk), _chunks(old, new))
                timed(f"{name}decode", lambda part, into, codec=codec: codec.apply(part, *into), made, _chunks(image))
                assert np.array_equal(image, new), codec.name
    speed = {name: old.nbytes / statistics.median(each) / 1e9 for name, each in wall_s.items()}
    per_core = {name: old.nbytes / statistics.median(each) / 1e9 for name, each in core_s.items()}
    return {
        **{f"{name}_gb_s": value for name, value in speed.items()},
        **{f"{name}_gb_per_core_s": value for name, value in per_core.items()},
        "scan_vs_memcpy": statistics.median(a / b for a, b in zip(core_s["copy"], core_s["scan"], strict=True)),
        "pays_off_below_gbit_s": 8 * min(speed["encode"], speed["decode"]),
    }


def _scan(chunk: tuple[Bits, Bits]) -> int:
    """The part of encoding that reads both images."""
    from async_rl.transport.delta.scan import find

    old, new = chunk
    blocks = old.size // 64
    words, firsts, in_order = np.empty(blocks, np.uint64), np.empty(blocks, np.int64), np.empty(old.size // 4, np.int64)
    return find(old, new, 7, 1 << 15, words, firsts, in_order, np.zeros(256, np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = delta_figures(args.images)
    for name, value in figures.items():
        print(f"{name:34} {value:.4g}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
