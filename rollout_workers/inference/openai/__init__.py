"""ServedModels behind a server that speaks OpenAI's protocol: `backend.py` first."""
