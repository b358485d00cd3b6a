/* SPDX-License-Identifier: MIT
 * Compare a kernel of your own with this project's: a shared library for `fp8flow bench OPERATIONS --plugin
 * FILE`. It exports one C function, fp8flow_plugin, which returns a table of the operations that it has. For
 * each of them bench makes the tensors of the row's shape, runs its own kernel and yours on the same values,
 * compares every tensor, and times both with the same clocks, buffers and cache. An example:
 * examples/bench_plugin.c; step by step: docs/usage/bench.md. This header needs nothing else of the project.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FP8FLOW_PLUGIN_VERSION 1

/* A tensor, row-major and contiguous. Its name is that of the member in the operation's arguments
 * (kernels/ops, one struct an operation): "x", "gamma". A tensor with scales is two: "dst" and "dst.scales".
 * Routed rows are "groups.counts" and "groups.offsets", int64. Inputs and outputs alike; what is optional and
 * not given is not there. */
typedef struct fp8flow_plugin_tensor {
    const char* name;
    void* data;        /* memory of the GPU with backend hopper, else of the host */
    const char* dtype; /* "f32" "bf16" "f16" "e4m3" "e5m2" "e8m0" "i32" "i64" "f64" */
    int32_t rank;      /* 1 to 4 */
    int64_t dims[4];
} fp8flow_plugin_tensor;

/* Every other argument: "eps", "groups.alignment", "options.score". Enumerations are numbered from 0 in the
 * order of their header; "dst.layout" and "dst.format" are a ScaleLayout and a ScaleFormat of
 * kernels/core/scaled_tensor.h. Integers above 2^53 are rounded. */
typedef struct fp8flow_plugin_number {
    const char* name;
    double value;
} fp8flow_plugin_number;

typedef struct fp8flow_plugin_call {
    const char* operation;
    const fp8flow_plugin_tensor* tensors;
    const fp8flow_plugin_number* numbers;
    int32_t num_tensors, num_numbers;
    int32_t on_gpu; /* 1: backend hopper */
    void* stream;   /* a cudaStream_t: give it all work, and do not wait. Host: NULL, return when done */
} fp8flow_plugin_call;

/* 0: done, or given to the stream. Anything else: not for this shape; bench says so and leaves it out. Called
 * many times for the same tensors; must neither keep state between calls nor write to inputs. */
typedef int (*fp8flow_plugin_run)(const fp8flow_plugin_call* call);

typedef struct fp8flow_plugin_operation {
    const char* operation; /* as `fp8flow bench --list` has it */
    fp8flow_plugin_run run;
} fp8flow_plugin_operation;

typedef struct fp8flow_plugin_table {
    int32_t version;  /* FP8FLOW_PLUGIN_VERSION */
    const char* name; /* in tables and results */
    int32_t num_operations;
    const fp8flow_plugin_operation* operations;
} fp8flow_plugin_table;

/* What the library exports. The table lives as long as the library. */
const fp8flow_plugin_table* fp8flow_plugin(void);

#ifdef __cplusplus
}
#endif
