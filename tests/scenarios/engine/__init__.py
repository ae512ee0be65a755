"""The inference engine, its replicas and other backends on small models."""
