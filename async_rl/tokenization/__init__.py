"""Text to token ids and back: `tokenizers.py`; conversations to rows of tokens: `rendering.py`."""
