"""The format of checkpoints on disk, without torch: `manifest.py` first."""
