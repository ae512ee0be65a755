"""The gateway over real sockets, and agents with the real engine."""
