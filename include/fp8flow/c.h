/* SPDX-License-Identifier: MIT
 * The C interface of libfp8flow: operations of the experts, and one MoE layer, on plain pointers, sizes and a
 * stream. For programs and languages that do not speak C++; the Python package is built on it.
 *
 * Declarations here do not change. A later version adds to them and raises FP8FLOW_C_VERSION. Every struct
 * begins with its size: set it to sizeof the struct. Set everything that you do not use, `reserved` included,
 * to 0, as designated initialisers do. A struct of another version is rejected. No exception leaves a call.
 * Tensors are row-major and contiguous, in host memory for the reference backend, in the memory of the
 * context's GPU for the Hopper backend. They must stay valid during the call and the work that it queues on
 * the stream. `stream` is a cudaStream_t. The reference backend ignores it, and its calls return when the
 * work is done. Letters: T tokens, K choices per token, E experts, H hidden size, F expert width, M routed
 * rows with padding. Full contracts: kernels/ops/ (one struct per operation).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FP8FLOW_C_VERSION 2
int fp8flow_c_version(void); /* of the library: at least the header's, or do not call it */

/* Calls return one of these. The text of the last failure on this thread: what, where, numbers; never null.
 */
enum fp8flow_status {
    FP8FLOW_OK = 0,
    FP8FLOW_USAGE = 2,    /* an argument, or a backend that cannot run here */
    FP8FLOW_MEMORY = 12,  /* the device or the host has too little */
    FP8FLOW_INTERNAL = 70 /* shapes that contradict each other, or a failure of the device */
};
const char* fp8flow_last_error(void);

/* ---- context: the operations of one device. Calls on one context are made one after the other (a lock sees
 * to it); on a GPU each also follows the one before where they name different streams. */
typedef struct fp8flow_context fp8flow_context;
/* backend: "reference", "hopper" or "auto" (Hopper where `device` is a usable GPU). */
int fp8flow_context_create(const char* backend, int device, fp8flow_context** context);
void fp8flow_context_destroy(fp8flow_context* context);              /* after its layers; null is allowed */
const char* fp8flow_context_backend(const fp8flow_context* context); /* "reference" or "hopper" */

/* ---- tensors */
enum fp8flow_dtype {
    FP8FLOW_F32 = 0,
    FP8FLOW_BF16 = 1,
    FP8FLOW_F16 = 2,
    FP8FLOW_E4M3 = 3,
    FP8FLOW_E5M2 = 4,
    FP8FLOW_E8M0 = 5, /* a power of two: 2^(byte - 127) */
    FP8FLOW_I32 = 6,
    FP8FLOW_I64 = 7
};
typedef struct fp8flow_tensor {
    size_t size; /* sizeof(fp8flow_tensor) */
    void* data;
    int32_t dtype; /* enum fp8flow_dtype */
    int32_t rank;  /* 1 to 4 */
    int64_t dims[4];
    int64_t reserved[4];
} fp8flow_tensor;

/* Which FP8 values [.., R, C] share a scale, and where it is; x = value * scale. */
enum fp8flow_layout {
    FP8FLOW_PLAIN = 0,       /* no scales: an ordinary tensor */
    FP8FLOW_VEC128_WIRE = 3, /* 1x128 blocks, [R, C/128] e8m0 (or f32) */
    FP8FLOW_VEC128 = 4,      /* 1x128 blocks, [C/128, R] f32: operands of GEMMs */
    FP8FLOW_BLOCK128 = 5,    /* weights: 128x128 blocks, [E, R/128, C/128 padded to 4] f32 */
    FP8FLOW_TILE128 = 6      /* a transposed copy [dim, M]: 128x128 tiles, [M/128, dim/128] f32 */
};
/* What scales are. pow2: powers of two, as transpose_fp8 needs; fp32: maximum / 448 exactly. undeclared: a
 * tensor without a declared format; quantisers take one of the other two. */
enum fp8flow_scale_format { FP8FLOW_UNDECLARED = 0, FP8FLOW_POW2 = 1, FP8FLOW_FP32 = 2 };
typedef struct fp8flow_scaled {
    size_t size;                  /* sizeof(fp8flow_scaled) */
    fp8flow_tensor codes, scales; /* divisions above round up */
    int32_t layout;               /* enum fp8flow_layout; plain: `scales` is not looked at */
    /* enum fp8flow_scale_format, declared by the owner: a call that writes other scales is refused, as is
     * one that copies scales of another format here. E8M0 scales are pow2 without it. */
    int32_t scale_format;
    int64_t reserved[4];
} fp8flow_scaled;

/* M rows sorted by expert: of group g counts[g] rows, then pads, from row offsets[g] to offsets[g + 1].
 * Operations read sizes in device memory; they write pads as zeros and nothing past offsets[num_groups]. */
typedef struct fp8flow_groups {
    size_t size; /* sizeof(fp8flow_groups) */
    int64_t num_groups;
    const int64_t* counts;  /* [num_groups] */
    const int64_t* offsets; /* [num_groups + 1], multiples of alignment */
    int64_t row_capacity;   /* M: at least offsets[num_groups] */
    int64_t alignment;      /* 128 wherever a scale spans rows */
    int64_t reserved[4];
} fp8flow_groups;

/* ---- quantisers (E4M3). src f32, bf16 or f16 [M, C]; groups null: all rows are one group without pads. */
/* dst: FP8 [M, C], vec128 or vec128_wire. */
int fp8flow_quantize_rows(fp8flow_context* context, const fp8flow_tensor* src, const fp8flow_groups* groups,
                          int scale_format, const fp8flow_scaled* dst, void* stream);
/* dst: transposed FP8 [C, M], vec128: 128x1 blocks of src, counted from a group's first row. */
int fp8flow_quantize_columns(fp8flow_context* context, const fp8flow_tensor* src,
                             const fp8flow_groups* groups, int scale_format, const fp8flow_scaled* dst,
                             void* stream);
/* src f32 or bf16 [E, N, K] -> fprop [E, N, K] and its exact transpose dgrad [E, K, N], both block128; one of
 * the two may be null. */
int fp8flow_quantize_weight(fp8flow_context* context, const fp8flow_tensor* src, int scale_format,
                            const fp8flow_scaled* fprop, const fp8flow_scaled* dgrad, void* stream);

/* src [M, dim] vec128, declared FP8FLOW_POW2 -> dst [dim, M] tile128: exponents are shifted, nothing is
 * dequantised. The reference backend reads the scales and refuses others; on a GPU the declaration counts. */
int fp8flow_transpose_fp8(fp8flow_context* context, const fp8flow_scaled* src, const fp8flow_groups* groups,
                          const fp8flow_scaled* dst, void* stream);

/* ---- plan, permute and pad */
/* Written by fp8flow_plan_rows, all of it, into memory of the caller; rows of an expert are in ascending
 * tokens. */
typedef struct fp8flow_plan {
    size_t size;             /* sizeof(fp8flow_plan) */
    fp8flow_groups groups;   /* num_groups is E; row_capacity from fp8flow_max_rows */
    int32_t* row_source;     /* [M] the token that feeds row r; -1: a pad, or past the last group */
    float* row_prob;         /* [M] its probability; 0 where row_source is -1 */
    int32_t* token_rows;     /* [T, K] rows of token t in ascending experts */
    int64_t* token_offsets;  /* [2] 0 and T, which unpermute reads */
    int64_t tokens, choices; /* T (0 is allowed), K */
    int64_t reserved[4];
} fp8flow_plan;
/* M that suffices whatever the routing is; -1: tokens is negative, another argument is not positive, or M
 * does not fit 32 bits. */
int64_t fp8flow_max_rows(int64_t tokens, int64_t choices, int64_t experts, int64_t alignment);
/* ids i32 [T, K], all different in a row and in [0, E); probs f32 [T, K]. The reference backend refuses other
 * ids. On a GPU nobody waits to read them: an id outside names no expert, and one named twice counts once, so
 * that the sum of groups.counts is T * K exactly where all ids are right. */
int fp8flow_plan_rows(fp8flow_context* context, const fp8flow_tensor* ids, const fp8flow_tensor* probs,
                      const fp8flow_plan* plan, void* stream);
/* src [T, H] -> dst [M, H]: both plain of one dtype (bf16, f32), or FP8 with vec128_wire -> vec128. */
int fp8flow_permute_pad(fp8flow_context* context, const fp8flow_scaled* src, const fp8flow_plan* plan,
                        const fp8flow_scaled* dst, void* stream);
/* src [M, H] bf16 or f32 -> dst [T, H] bf16 or f32: a token's rows summed in fp32 in ascending experts.
 * weights: null, or f32 [M] to multiply rows by (a plan's row_prob). */
int fp8flow_unpermute(fp8flow_context* context, const fp8flow_tensor* src, const fp8flow_plan* plan,
                      const float* weights, const fp8flow_tensor* dst, void* stream);

/* ---- experts */
/* d[r] = a[r] b[g]^T for every row r of group g. a [M, K], b [E, N, K]: vec128 by block128, or plain bf16 or
 * f32; d [M, N] bf16 or f32. Sums in fp32. */
int fp8flow_grouped_gemm(fp8flow_context* context, const fp8flow_scaled* a, const fp8flow_scaled* b,
                         const fp8flow_groups* groups, const fp8flow_tensor* d, void* stream);
/* dw[g] = dy_g^T x_g over the rows of group g. FP8: transposed copies dy [N, M], x [K, M], tile128 or vec128;
 * plain: dy [M, N], x [M, K]. dw f32 [E, N, K]. */
int fp8flow_grouped_gemm_wgrad(fp8flow_context* context, const fp8flow_scaled* dy, const fp8flow_scaled* x,
                               const fp8flow_groups* groups, const fp8flow_tensor* dw, void* stream);
/* a = quantise(silu(gate) * up * prob), h = [gate, up] bf16 or f32 [M, 2F], a [M, F] vec128, F a multiple of
 * 128. prob: f32 [M], null: 1. groups null: as above. */
int fp8flow_swiglu_quantize(fp8flow_context* context, const fp8flow_tensor* h, const float* prob,
                            const fp8flow_groups* groups, int scale_format, const fp8flow_scaled* a,
                            void* stream);

/* ---- one MoE layer: router, dispatch, experts, combine, on one device. The caller keeps the weights; the
 * layer has the copies that its GEMMs read, saved rows and workspace. Calls on one layer follow each other.
 */
typedef struct fp8flow_layer fp8flow_layer;
typedef struct fp8flow_layer_spec {
    size_t size;             /* sizeof(fp8flow_layer_spec) */
    int64_t hidden_size;     /* H, a multiple of 128 */
    int64_t ffn_hidden_size; /* F, a multiple of 128 */
    int64_t num_experts;
    int64_t topk;
    int64_t max_tokens;  /* of one call; buffers are sized for the worst routing */
    const char* recipe;  /* "bf16", "fp8_tensorwise", "fp8_blockwise", "fp8_flow", "fp8_rowwise", "mxfp8" */
    double topk_scaling; /* factor of the probabilities; 1 as a rule */
    /* 0: softmax over the chosen experts. 1: over all, before the choice, and not normalised again. */
    int32_t pre_softmax;
    int32_t weight_dtype; /* of set_weights and the gradients of experts: FP8FLOW_F32 or FP8FLOW_BF16 */
    int64_t reserved[8];
} fp8flow_layer_spec;
int fp8flow_layer_create(fp8flow_context* context, const fp8flow_layer_spec* spec, fp8flow_layer** layer);
void fp8flow_layer_destroy(fp8flow_layer* layer); /* null is allowed */

/* Tensors of the weights' shapes: router [E, H], w1 [E, 2F, H] (gate rows, then up rows), w2 [E, H, F]. */
typedef struct fp8flow_layer_weights {
    size_t size; /* sizeof(fp8flow_layer_weights) */
    const void *router, *w1, *w2;
    int64_t reserved[4];
} fp8flow_layer_weights;
typedef struct fp8flow_layer_gradients {
    size_t size;   /* sizeof(fp8flow_layer_gradients) */
    float* router; /* f32 whatever weight_dtype is */
    void *w1, *w2; /* of weight_dtype */
    int64_t reserved[4];
} fp8flow_layer_gradients;
/* Casts or quantises the weights into the layer's copies. Before the first forward, and after every change.
 */
int fp8flow_layer_set_weights(fp8flow_layer* layer, const fp8flow_layer_weights* weights, void* stream);
/* y = layer(x), bf16 [T, H], T up to max_tokens, y another tensor than x. */
int fp8flow_layer_forward(fp8flow_layer* layer, const void* x, void* y, int64_t tokens, void* stream);
/* Of the last forward, once; its x still holds what it held. dy, dx bf16 [T, H]; gradients are overwritten.
 */
int fp8flow_layer_backward(fp8flow_layer* layer, const void* dy, void* dx,
                           const fp8flow_layer_gradients* gradients, void* stream);

#ifdef __cplusplus
}
#endif
