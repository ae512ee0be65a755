"""What a run did as OpenTelemetry spans: `making.py` makes them of events and groups, `export.py` sends them."""
