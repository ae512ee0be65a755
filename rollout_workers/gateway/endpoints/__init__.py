"""The HTTP endpoints of the gateway: `chat.py` first; `requests.py` holds the fields they share."""
