/* SPDX-License-Identifier: MIT
 * A plugin of bench whose kernels are wrong in the ways that bench has to notice; what each does: its name.
 */
#include <fp8flow/plugin.h>
#include <stddef.h>
#include <string.h>

static const fp8flow_plugin_tensor* tensor(const fp8flow_plugin_call* call, const char* name) {
    for (int i = 0; i < call->num_tensors; ++i)
        if (strcmp(call->tensors[i].name, name) == 0) return &call->tensors[i];
    return NULL;
}
static double number(const fp8flow_plugin_call* call, const char* name) {
    for (int i = 0; i < call->num_numbers; ++i)
        if (strcmp(call->numbers[i].name, name) == 0) return call->numbers[i].value;
    return -1;
}

/* The right values but one. */
static int one_value_wrong(const fp8flow_plugin_call* call) {
    const float *a = tensor(call, "a")->data, *b = tensor(call, "b")->data;
    const fp8flow_plugin_tensor* y = tensor(call, "y");
    float* sum = y->data;
    const int64_t n = y->dims[0] * y->dims[1];
    for (int64_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
    sum[n - 1] += 1;
    return 0;
}

/* Writes nothing. */
static int nothing_done(const fp8flow_plugin_call* call) { return call->num_tensors < 1; }

/* Refuses every call: with 1 where the arguments are those of the test's shape. */
static int arguments_seen(const fp8flow_plugin_call* call) {
    const fp8flow_plugin_tensor *src = tensor(call, "src"), *codes = tensor(call, "dst"),
                                *scales = tensor(call, "dst.scales"),
                                *offsets = tensor(call, "groups.offsets");
    if (src == NULL || codes == NULL || scales == NULL || offsets == NULL) return 2;
    if (strcmp(src->dtype, "bf16") != 0 || strcmp(codes->dtype, "e4m3") != 0) return 3;
    if (src->rank != 2 || src->dims[1] != 256 || offsets->dims[0] != 5) return 4;
    if (number(call, "groups.num_groups") != 4 || number(call, "groups.alignment") != 128) return 5;
    if (number(call, "dst.layout") < 0 || number(call, "scale_format") != 0) return 6;
    if (call->on_gpu != 0 || strcmp(call->operation, "quantize_rows") != 0) return 7;
    return 1;
}

static const fp8flow_plugin_operation operations[] = {
    {"add", one_value_wrong}, {"swiglu", nothing_done}, {"quantize_rows", arguments_seen}};
static const fp8flow_plugin_table table = {FP8FLOW_PLUGIN_VERSION, "wrong", 3, operations};

const fp8flow_plugin_table* fp8flow_plugin(void) { return &table; }
