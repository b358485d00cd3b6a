# fp8flow with the CUDA backend and attention on cuDNN, in two stages: one that builds, one that holds the program and what it loads.
#   docker build -t fp8flow .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/data" fp8flow train /opt/fp8flow/configs/text.yaml --set data.data_path=[/data/text] --out /data/runs/one
# Four ranks, one a GPU (one container: CUDA IPC shares memory between its processes):
#   docker run --rm --gpus all --ipc=host -v "$PWD:/data" --entrypoint mpirun fp8flow -n 4 --bind-to none --quiet fp8flow train ...
# --ipc=host (or --shm-size=8g): Docker's /dev/shm of 64 MiB is too small for MPI's and NCCL's shared memory. The program runs as user 10001,
# who must be able to write the mounted folder (or give docker run --user "$(id -u):$(id -g)"); training data comes from a mounted folder.
ARG CUDA_VERSION=13.0.1
ARG UBUNTU=ubuntu24.04

FROM nvidia/cuda:${CUDA_VERSION}-cudnn-devel-${UBUNTU} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
# Dependencies first: they change less often than the sources.
COPY scripts/common.sh scripts/setup_deps.sh scripts/fetch_deps.sh scripts/
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl \
    && rm -rf /var/lib/apt/lists/*
RUN ./scripts/setup_deps.sh build \
    && ./scripts/fetch_deps.sh \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN cmake --preset cuda-release -DFP8FLOW_DEPS=/src/.deps -DFP8FLOW_CUDNN=ON -DFP8FLOW_TESTS=OFF \
    && cmake --build build/cuda-release --target fp8flow --parallel "$(nproc)" \
    && strip build/cuda-release/fp8flow

FROM nvidia/cuda:${CUDA_VERSION}-cudnn-runtime-${UBUNTU}
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 openmpi-bin \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin fp8flow \
    && install -d -o fp8flow /data
COPY --from=build /src/build/cuda-release/fp8flow /usr/local/bin/fp8flow
COPY configs /opt/fp8flow/configs
COPY LICENSE NOTICE /opt/fp8flow/
# No NVLink multicast; no copies through another process' memory, which containers forbid; hardware threads are fine as slots.
ENV NCCL_NVLS_ENABLE=0 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none \
    OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_btl_base_warn_component_unused=0
USER fp8flow
WORKDIR /data
ENTRYPOINT ["fp8flow"]
CMD ["--help"]
