"""Where metrics go, outside metrics.jsonl: one file per library, and the thread that they write on."""
