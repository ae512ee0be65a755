"""Tables of problems: which row is posed when, and what an answer to it is worth."""
