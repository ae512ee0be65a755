"""DeepMind's Reverb: a C++ server with a queue table, a trajectory writer on one side, a sampler on the other.

One item is one rollout. The server is a process of its own, everything in it is in memory only. Runs in the virtual
environment of `reverb_requirements.txt`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import reverb
from rollouts import GROUP, Portions, check, group_of, parse_args, report, rollouts_per_s

TABLE = "rollouts"
CAPACITY = 192 * GROUP
"""Capacity in rollouts, as in our buffer with 64 groups a step and a max_age of 2."""
UNCONFIRMED = 32
"""Items that a writer may have in flight."""


def serve(ready: Connection) -> None:
    server = reverb.Server([reverb.Table.queue(TABLE, CAPACITY)])
    ready.send(f"localhost:{server.port}")
    server.wait()


def write(where: str, name: str, tokens: int, portions: Portions) -> None:
    group = group_of(tokens, seed=0)
    client = reverb.Client(where)
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for count in portions:
            for _ in range(count):
                for rollout in group:
                    writer.append(rollout)
                    last = {key: column[-1] for key, column in writer.history.items()}
                    writer.create_item(TABLE, priority=1.0, trajectory=last)
                    writer.flush(block_until_num_items=UNCONFIRMED)
            writer.flush()


def read(where: str, tokens: int, portions: Portions) -> None:
    client = reverb.Client(where)
    columns = sorted(group_of(1, seed=0)[0])  # the order in which Reverb flattens a dictionary
    for count in portions:
        for sample in client.sample(TABLE, num_samples=count * GROUP, emit_timesteps=False):
            check(dict(zip(columns, sample.data, strict=True)), tokens)


def main() -> None:
    args = parse_args(__doc__)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        report(rollouts_per_s(write, read, ours.recv(), tokens=args.tokens, groups=args.groups, writers=args.writers))
    finally:
        server.kill()
        server.join()


if __name__ == "__main__":
    main()
