"""Commands of ``collm``: one file a noun; each exposes ``register(app)``."""
