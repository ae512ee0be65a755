"""The model behind `async-rl simulate`."""
