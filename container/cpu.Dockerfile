# snugfit without a GPU: predictions, plans and checks. container/README.md describes its use.
# The digest is that of the multi-platform index of debian:bookworm-slim.
ARG BASE=debian:bookworm-slim@sha256:7b140f374b289a7c2befc338f42ebe6441b7ea838a042bbd5acbfca6ec875818

FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 snugfit \
 && install -d -o snugfit /work \
 && python3 -m venv /opt/snugfit
ENV PATH=/opt/snugfit/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /opt/snugfit/

FROM python AS wheel
ARG PACKAGES_FROM=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps ${PACKAGES_FROM} --wheel-dir /wheel .

# Each layer changes more often than the one before it: torch, the other packages, snugfit.
FROM python
ARG TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"
RUN pip install -c /opt/snugfit/constraints.txt ${TORCH_FROM} torch==2.13.0
ARG PACKAGES_FROM=""
ARG EXTRAS="train peft"
COPY pyproject.toml container/dependencies.py /opt/snugfit/
RUN python /opt/snugfit/dependencies.py /opt/snugfit/pyproject.toml ${EXTRAS} > /tmp/dependencies.txt \
 && pip install -c /opt/snugfit/constraints.txt ${PACKAGES_FROM} -r /tmp/dependencies.txt \
 && rm /tmp/dependencies.txt
COPY --from=wheel /wheel /opt/snugfit/wheel
RUN pip install --no-deps --no-index /opt/snugfit/wheel/*.whl

LABEL org.opencontainers.image.title=snugfit \
      org.opencontainers.image.licenses=Apache-2.0
USER snugfit
WORKDIR /work
ENTRYPOINT ["snugfit"]
CMD ["--help"]
