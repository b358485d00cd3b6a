// SPDX-License-Identifier: MIT
// What other programs use of fp8flow: the operations (Ops), the exchange between ranks, one MoE layer
// (LoneLayer), and flows of their own (register_flow). C++20; no MPI, YAML or CUDA header comes with it.
// The headers below hold the contracts: shapes, dtypes, layouts, errors.
//
//   find_package(fp8flow REQUIRED)                     target_link_libraries(mine fp8flow::fp8flow)
//   find_package(fp8flow REQUIRED COMPONENTS mpi)      fp8flow::mpi: make_mpi_group, ranks over MPI
//
// Ranks are the caller's: derive from ProcessGroup (transfer, split), or use make_thread_groups, or MPI's.
// Before 1.0 the interface may change with a minor version.
#pragma once

#include "fp8flow/kernels/backends/backends.h"
#include "fp8flow/kernels/comm/process_group.h"
#include "fp8flow/kernels/core/error.h"
#include "fp8flow/kernels/core/scalar_math.h"
#include "fp8flow/kernels/ops.h"
#include "fp8flow/layers/lone/lone_layer.h"
