"""Real processes and real models: whole runs, engine, gateway, learner, training, wire, environments."""
