"""Messages between processes: environments attached to a run and their mix."""
