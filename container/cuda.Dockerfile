# snugfit on NVIDIA GPUs: all commands, with Triton for the fused kernels. container/README.md describes its use.
# The base image has CUDA's runtime alone: torch's wheels bring cuBLAS, cuDNN and NCCL of their own.
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701

FROM ${BASE} AS python
# Triton compiles its launcher with gcc, against Python's headers. The user 1000 of Ubuntu's images is removed.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && (userdel --remove ubuntu || true) \
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
ARG TORCH_FROM="--index-url https://download.pytorch.org/whl/cu130"
RUN pip install -c /opt/snugfit/constraints.txt ${TORCH_FROM} torch==2.13.0
ARG PACKAGES_FROM=""
ARG EXTRAS="train bnb peft compile liger fp8"
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
