"""Services, child processes and ranks."""
