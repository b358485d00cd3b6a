/* SPDX-License-Identifier: MIT
 * Your own kernel next to fp8flow's: y = a + b in f32, on the host.
 *   cc -O3 -shared -fPIC -I include examples/bench_plugin.c -o bench_plugin.so
 *   fp8flow bench add --backend reference --shape dtype=f32 --plugin ./bench_plugin.so
 * On a GPU: bench_plugin.cu. */
#include <fp8flow/plugin.h>
#include <stddef.h>
#include <string.h>

/* NULL: the operation was not given such a tensor. */
static const fp8flow_plugin_tensor* tensor(const fp8flow_plugin_call* call, const char* name) {
    for (int i = 0; i < call->num_tensors; ++i)
        if (strcmp(call->tensors[i].name, name) == 0) return &call->tensors[i];
    return NULL;
}

static int add(const fp8flow_plugin_call* call) {
    const fp8flow_plugin_tensor *a = tensor(call, "a"), *b = tensor(call, "b"), *y = tensor(call, "y");
    if (call->on_gpu || strcmp(y->dtype, "f32") != 0) return 1; /* not for this */
    int64_t n = 1;
    for (int i = 0; i < y->rank; ++i) n *= y->dims[i];
    const float *left = a->data, *right = b->data;
    float* sum = y->data;
    for (int64_t i = 0; i < n; ++i) sum[i] = left[i] + right[i];
    return 0;
}

static const fp8flow_plugin_operation operations[] = {{"add", add}};
static const fp8flow_plugin_table table = {FP8FLOW_PLUGIN_VERSION, "mine", 1, operations};

const fp8flow_plugin_table* fp8flow_plugin(void) { return &table; }
