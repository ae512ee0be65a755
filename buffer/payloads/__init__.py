"""The bytes of groups: `codec.py` first; `store.py` says where they lie, `files.py` keeps large ones beside Redis."""
