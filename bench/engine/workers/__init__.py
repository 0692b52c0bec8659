"""One program an engine, each run by the Python of its own environment.

A worker loads the model, says so, and then answers one JSON line for each JSON line it reads.
They import nothing of this project except ``common`` beside them (the collm worker aside).
"""
