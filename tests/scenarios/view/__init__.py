"""The page of `async-rl view`, in a browser."""
