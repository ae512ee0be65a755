"""Several processes that train one model, and what each of them does."""
