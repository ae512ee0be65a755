"""The buffer's commands and the audit of a run."""
