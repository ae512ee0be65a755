"""`async-rl env check`: plays an environment before anybody trains on it, and says what is wrong with it."""
