"""Several engines (replicas) in one worker, each of one or more tensor-parallel ranks. Every rank is a process.

    EngineFleet ──▶ Replica 0 ──▶ rank 0: MegatronEngine ── the same calls ──▶ rank 1, 2 ...
        │           Replica 1 ──▶ rank 0: MegatronEngine ── the same calls ──▶ rank 1, 2 ...
        └── SharedWeights: tells all ranks where the worker has a version, which they read there

They communicate over inherited socket pairs: nothing listens on an address. `fleet.py` first.
"""

from rollout_workers.inference.replicas.fleet import EngineFleet

__all__ = ["EngineFleet"]
