"""The pace of rollouts: how many groups may be on their way, so that age buys throughput; `controller.py` first."""
