# Two images of one tree: `control` (gateway, dispatcher, launcher, coordinator, command line;
# no torch) and `replica` (the model). Both run as user 10001.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/wheels \
    PIP_ROOT_USER_ACTION=ignore XDG_CACHE_HOME=/var/cache COLLM_DATA_DIR=/data
RUN useradd --uid 10001 --create-home collm \
    && mkdir -p /data /var/cache/collm/models \
    && chown -R collm /data /var/cache/collm \
    && printf '#!/bin/sh\nexec python -m collm "$@"\n' > /usr/local/bin/collm \
    && chmod 755 /usr/local/bin/collm
WORKDIR /app
COPY deploy/wheels /wheels
COPY deploy/healthy.sh /usr/local/bin/collm-healthy
COPY pyproject.toml requirements.lock ./
COPY tools/dependencies.py tools/

FROM base AS control
RUN python tools/dependencies.py dashboard otel > /tmp/wanted \
    && python -m pip install -c requirements.lock -r /tmp/wanted && rm /tmp/wanted
COPY config config
COPY shared shared
COPY collm collm
COPY loadgen loadgen
COPY sim sim
COPY services services
RUN python -m compileall -q .
USER 10001
VOLUME ["/data", "/var/cache/collm"]

# gcc: the engine compiles its kernels for the processor it runs on.
FROM base AS replica-packages
ARG TORCH_ARGS=""
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
# torch alone and first, so that nothing else decides which build of it is taken.
# hadolint ignore=SC2086
RUN python -m pip install ${TORCH_ARGS} "$(grep '^torch==' requirements.lock)"
RUN python tools/dependencies.py replica > /tmp/wanted \
    && python -m pip install -c requirements.lock -r /tmp/wanted && rm /tmp/wanted

# The default model, so that a first start needs no network.
FROM replica-packages AS model
COPY shared shared
COPY collm/__init__.py collm/models.py collm/
COPY services/__init__.py services/
COPY services/replica/__init__.py services/replica/gguf_convert.py services/replica/
USER 10001
RUN python -c "from collm import models; models.resolve(models.DEFAULT_NAME, print)"

FROM replica-packages AS replica
COPY --from=model --chown=10001 /var/cache/collm /var/cache/collm
COPY config config
COPY shared shared
COPY collm collm
COPY loadgen loadgen
COPY sim sim
COPY services services
COPY deploy/replica.sh /usr/local/bin/collm-replica
# The engine keeps its compiled kernels beside their sources.
RUN python -m compileall -q . \
    && install -d -o 10001 services/replica/engines/torch/kernels/__pycache__
USER 10001
VOLUME ["/data", "/var/cache/collm"]
CMD ["collm-replica"]
