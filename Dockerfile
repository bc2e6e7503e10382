# darts-server on vLLM's own image, for machines with NVIDIA GPUs:
#
#   docker build -t darts-server .
#   docker run --gpus all --ipc host -p 127.0.0.1:8000:8000 -e VLLM_API_KEY -v darts-cache:/cache -v darts-state:/state \
#     darts-server Qwen/Qwen3-8B --host 0.0.0.0
#
# Runs as any user of group 0. /cache is its home: models, compiled kernels. /state is what was learned of prompts.

ARG VLLM_VERSION=0.31.0
# A mirror, or the image by its digest. It must hold VLLM_VERSION.
ARG BASE_IMAGE=vllm/vllm-openai:v${VLLM_VERSION}
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY darts_server ./darts_server
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
ARG VLLM_VERSION
ARG VERSION=0.1.0
ARG REVISION=unknown
# [ray] for several servers under Ray.
ARG EXTRAS=

COPY --from=wheel /wheels /tmp/wheels
# Nearly all that we need is there already. Whatever pip did, vLLM must still be the one that we are tested with.
RUN python3 -m pip install --no-cache-dir "$(echo /tmp/wheels/*.whl)${EXTRAS}" \
    && rm -r /tmp/wheels \
    && darts-server version \
    && python3 -c "import sys; from importlib.metadata import version; sys.exit(version('vllm').split('+')[0] != '${VLLM_VERSION}')" \
    && mkdir -p /cache /state \
    && chgrp 0 /cache /state \
    && chmod 2770 /cache /state

# USER and LOGNAME: a user without an entry in /etc/passwd has no other name, and torch asks for one.
ENV HOME=/cache \
    USER=darts \
    LOGNAME=darts \
    DARTS_STATE_DIR=/state \
    HEALTH_URL=http://127.0.0.1:8000/health \
    PYTHONUNBUFFERED=1

LABEL org.opencontainers.image.title="darts-server" \
      org.opencontainers.image.description="Rollout server for LLM reinforcement learning: vLLM's own server, plus shaped groups" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/vllm/vllm-openai:v${VLLM_VERSION}"

USER 2000:0
WORKDIR /cache
EXPOSE 8000
# What the server ends in order on: it writes down what it learned, and exits with 0.
STOPSIGNAL SIGTERM
# A large model takes long to be fetched and loaded. The server answers nothing before it can serve.
HEALTHCHECK --start-period=30m --interval=15s --timeout=5s --retries=4 \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=4)"]
# What one user of the group leaves in /cache and /state, the next may write too.
ENTRYPOINT ["sh", "-c", "umask 0007; exec darts-server serve \"$@\"", "darts-server"]
CMD ["--help"]
