# `docker build -t kvplan .`, then `docker run --rm -v "$PWD:/repo:ro" kvplan [POLICY] [--base REV]` in your repository.
# The light install: no GPU library, no torch. The build takes the network for pip and apt, a check does not.
FROM python:3.12-slim AS build
COPY pyproject.toml README.md LICENSE models.yaml /source/
COPY kvplan /source/kvplan
COPY engine /source/engine
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
# The mounted repository belongs to whoever runs docker; git reads it all the same, and no other one.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /repo
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels \
    && useradd --uid 10001 --create-home kvplan
USER 10001
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR /repo
ENTRYPOINT ["kvplan", "check"]
