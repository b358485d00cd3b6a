// SPDX-License-Identifier: MIT
// How rows travel between ranks: the choices of parallel.moe_token_dispatcher_type and
// parallel.moe_flex_dispatcher_backend. Read next: kernels/backends/backends.h.
#pragma once

#include <cstdint>

namespace fp8flow {

// alltoall: NCCL send and receive. flex: rows are stored into the peer memory of other GPUs on the same host,
// if a start-up test finds it usable on every rank, otherwise as alltoall. hierarchical: an exchange between
// hosts and one inside each host. One rank and the reference backend need none of them.
enum class TokenDispatcher : uint8_t { alltoall, flex, hierarchical };
// How flex maps peer memory. nvlink: the first of the others that works.
enum class FlexBackend : uint8_t { nvlink, cuda_ipc, nccl_window };

}  // namespace fp8flow
