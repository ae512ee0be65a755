"""The endpoints of the gateway: `chat.py` first; `requests.py` is what all of them share."""
