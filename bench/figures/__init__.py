"""The paper's figures from the simulator: ``python -m bench.figures`` (``make figures``).

``runs`` says what is simulated, ``plots`` draws it, ``page`` writes docs/evaluation/README.md.
"""
