"""Codec, selection, archive, payload files and commands of the buffer."""
