"""Several engines in one worker, each of one or more tensor-parallel ranks. Every rank is a process.

    EngineFleet ──▶ Replica 0 ──▶ rank 0: MegatronEngine ── the same calls ──▶ rank 1, 2 ...
        │           Replica 1 ──▶ rank 0: MegatronEngine ── the same calls ──▶ rank 1, 2 ...
        └── SharedWeights: one full set of parameters, which all of them read

They talk over pairs of sockets that each process is born with: nobody listens, and no address or file names them.
"""

from rollout_workers.inference.replicas.fleet import EngineFleet

__all__ = ["EngineFleet"]
