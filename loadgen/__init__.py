"""Load generator: replays traces against any OpenAI-compatible server and measures what comes.

``python -m loadgen …`` (the same as ``collm replay …``). One file a step: ``trace`` and
``arrivals`` say when and how long, ``prompts`` says what, ``client`` speaks HTTP,
``conversation`` one request, ``driver`` keeps the schedule, ``metrics`` (pure) computes,
``report`` prints and saves.
"""
