"""The adapters' examples, played with their real libraries; `make test-adapters`."""
