"""The checkpoint format on disk, without torch except in `draft.py`: `manifest.py` first."""
