// SPDX-License-Identifier: MIT
// The C interface, as C reads it: quantise, transpose, plan, permute and back, a GEMM with weights of ones, a
// layer forward and backward, and what is refused with which text.
#include <fp8flow/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 8, K = 2, E = 4, H = 128, F = 128 };

static int failures = 0;
#define EXPECT(condition)                                                                     \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            printf("line %d: not so: %s (%s)\n", __LINE__, #condition, fp8flow_last_error()); \
            ++failures;                                                                       \
        }                                                                                     \
    } while (0)

static fp8flow_tensor matrix(void* data, int dtype, int64_t rows, int64_t cols) {
    return (fp8flow_tensor){
        .size = sizeof(fp8flow_tensor), .data = data, .dtype = dtype, .rank = 2, .dims = {rows, cols}};
}
static fp8flow_scaled scaled(fp8flow_tensor codes, fp8flow_tensor scales, int layout, int scale_format) {
    return (fp8flow_scaled){.size = sizeof(fp8flow_scaled),
                            .codes = codes,
                            .scales = scales,
                            .layout = layout,
                            .scale_format = scale_format};
}
static int said(const char* text) { return strstr(fp8flow_last_error(), text) != NULL; }
static uint16_t bf16(float x) {  // exact for the few values here
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}
static float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Row t of x is t + 1; token t goes to the experts t % E and (t + 1) % E, and comes back doubled.
static void move_rows(fp8flow_context* context) {
    static float x[T * H], back[T * H], probs[T * K];
    static int32_t ids[T * K];
    for (int t = 0; t < T; ++t) {
        for (int h = 0; h < H; ++h) x[t * H + h] = (float)(t + 1);
        for (int k = 0; k < K; ++k) ids[t * K + k] = (t + k) % E, probs[t * K + k] = 0.5F;
    }
    const int64_t rows = fp8flow_max_rows(T, K, E, 128);
    EXPECT(rows >= E * 128 && fp8flow_max_rows(T, K, 0, 128) == -1);

    int64_t counts[E], offsets[E + 1], token_offsets[2];
    int32_t* row_source = malloc((size_t)rows * sizeof(int32_t));
    float* row_prob = malloc((size_t)rows * sizeof(float));
    float* moved = malloc((size_t)rows * H * sizeof(float));
    int32_t token_rows[T * K];
    fp8flow_plan plan = {.size = sizeof plan,
                         .groups = {.size = sizeof plan.groups,
                                    .num_groups = E,
                                    .counts = counts,
                                    .offsets = offsets,
                                    .row_capacity = rows,
                                    .alignment = 128},
                         .row_source = row_source,
                         .row_prob = row_prob,
                         .token_rows = token_rows,
                         .token_offsets = token_offsets,
                         .tokens = T,
                         .choices = K};
    const fp8flow_tensor id_view = matrix(ids, FP8FLOW_I32, T, K),
                         prob_view = matrix(probs, FP8FLOW_F32, T, K);
    EXPECT(fp8flow_plan_rows(context, &id_view, &prob_view, &plan, NULL) == FP8FLOW_OK);
    for (int e = 0; e < E; ++e) EXPECT(counts[e] == T * K / E && offsets[e] == e * 128);
    EXPECT(token_rows[0] == 0 && token_rows[1] == 128 && row_source[1] == 3 && row_source[4] == -1);
    EXPECT(row_prob[3] == 0.5F && row_prob[4] == 0);
    for (int64_t r = offsets[E]; r < rows; ++r) EXPECT(row_source[r] == -1 && row_prob[r] == 0);
    EXPECT(offsets[E] < rows);

    const fp8flow_tensor none = {.size = sizeof none};
    const fp8flow_scaled src = scaled(matrix(x, FP8FLOW_F32, T, H), none, FP8FLOW_PLAIN, 0),
                         dst = scaled(matrix(moved, FP8FLOW_F32, rows, H), none, FP8FLOW_PLAIN, 0);
    EXPECT(fp8flow_permute_pad(context, &src, &plan, &dst, NULL) == FP8FLOW_OK);
    EXPECT(moved[0] == 1 && moved[H] == 4 && moved[4 * H] == 0 && moved[128 * H] == 1);
    const fp8flow_tensor back_view = matrix(back, FP8FLOW_F32, T, H);
    EXPECT(fp8flow_unpermute(context, &dst.codes, &plan, NULL, &back_view, NULL) == FP8FLOW_OK);
    for (int i = 0; i < T * H; ++i) EXPECT(back[i] == 2 * x[i]);

    // hand-made groups and rows that lie outside
    const int64_t count = counts[1];
    counts[1] = 129;
    EXPECT(fp8flow_permute_pad(context, &src, &plan, &dst, NULL) == FP8FLOW_USAGE && said("group 1 has 129"));
    counts[1] = count, row_source[2] = T;
    EXPECT(fp8flow_permute_pad(context, &src, &plan, &dst, NULL) == FP8FLOW_USAGE && said("number 2 is 8"));
    token_rows[5] = (int32_t)rows;
    EXPECT(fp8flow_unpermute(context, &dst.codes, &plan, NULL, &back_view, NULL) == FP8FLOW_USAGE);

    const struct {
        int id;
        const char* text;
    } wrong[] = {
        {E, "token 3 names expert 4"}, {-1, "token 3 names expert -1"}, {INT32_MIN, "expert -2147483648"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
        ids[3 * K + 1] = wrong[i].id;
        EXPECT(fp8flow_plan_rows(context, &id_view, &prob_view, &plan, NULL) == FP8FLOW_USAGE);
        EXPECT(said(wrong[i].text));
    }
    ids[3 * K + 1] = ids[3 * K];
    EXPECT(fp8flow_plan_rows(context, &id_view, &prob_view, &plan, NULL) == FP8FLOW_USAGE);
    EXPECT(said("token 3 names expert 3 twice"));

    plan.groups.row_capacity = 128;
    EXPECT(fp8flow_plan_rows(context, &id_view, &prob_view, &plan, NULL) == FP8FLOW_USAGE);
    EXPECT(said("row_capacity is 128"));

    // no tokens: pointers of empty tensors may be null
    plan.groups.row_capacity = fp8flow_max_rows(0, K, E, 128);
    plan.tokens = 0, plan.token_rows = NULL;
    const fp8flow_tensor no_ids = matrix(NULL, FP8FLOW_I32, 0, K), no_probs = matrix(NULL, FP8FLOW_F32, 0, K),
                         no_rows = matrix(NULL, FP8FLOW_F32, 0, H);
    const fp8flow_scaled no_src = scaled(no_rows, none, FP8FLOW_PLAIN, 0);
    EXPECT(fp8flow_plan_rows(context, &no_ids, &no_probs, &plan, NULL) == FP8FLOW_OK);
    EXPECT(offsets[E] == 0 && counts[0] == 0 && token_offsets[1] == 0);
    for (int64_t r = 0; r < plan.groups.row_capacity; ++r) EXPECT(row_source[r] == -1);
    EXPECT(fp8flow_permute_pad(context, &no_src, &plan, &dst, NULL) == FP8FLOW_OK);
    EXPECT(fp8flow_unpermute(context, &dst.codes, &plan, NULL, &no_rows, NULL) == FP8FLOW_OK);
    EXPECT(fp8flow_max_rows(INT64_MAX, K, E, 128) == -1 && fp8flow_max_rows(INT32_MAX, K, E, 128) == -1);
    free(row_source), free(row_prob), free(moved);
}

// 128 rows of powers of two, rows of one scale each; E4M3 holds them exactly.
static void quantize(fp8flow_context* context) {
    static float x[128 * 256];
    static uint8_t codes[128 * 256], transposed[256 * 128];
    float scales[2 * 128], tiles[2];
    for (int r = 0; r < 128; ++r)
        for (int c = 0; c < 256; ++c) x[r * 256 + c] = r == 0 ? 2.0F : c < 128 ? 1.0F : 0.5F;
    const fp8flow_tensor src = matrix(x, FP8FLOW_F32, 128, 256);
    fp8flow_scaled rows = scaled(matrix(codes, FP8FLOW_E4M3, 128, 256), matrix(scales, FP8FLOW_F32, 2, 128),
                                 FP8FLOW_VEC128, FP8FLOW_POW2);
    EXPECT(fp8flow_quantize_rows(context, &src, NULL, FP8FLOW_POW2, &rows, NULL) == FP8FLOW_OK);
    EXPECT(codes[0] == 0x78 && codes[256] == 0x78);  // 256, the largest power of two
    EXPECT(scales[0] == 2.0F / 256 && scales[1] == 1.0F / 256 && scales[128 + 1] == 0.5F / 256);

    const fp8flow_scaled columns = scaled(matrix(transposed, FP8FLOW_E4M3, 256, 128),
                                          matrix(tiles, FP8FLOW_F32, 1, 2), FP8FLOW_TILE128, FP8FLOW_POW2);
    EXPECT(fp8flow_transpose_fp8(context, &rows, NULL, &columns, NULL) == FP8FLOW_OK);
    EXPECT(tiles[0] == 2.0F / 256 && tiles[1] == 2.0F / 256);
    EXPECT(transposed[0] == 0x78 && transposed[1] == 0x70 && transposed[128 * 128 + 1] == 0x68);

    EXPECT(fp8flow_quantize_rows(context, &src, NULL, 7, &rows, NULL) == FP8FLOW_USAGE);
    EXPECT(strstr(fp8flow_last_error(), "scale_format is 7") != NULL);
    EXPECT(fp8flow_quantize_rows(context, &src, NULL, FP8FLOW_POW2, &columns, NULL) == FP8FLOW_INTERNAL);
    EXPECT(fp8flow_quantize_rows(NULL, &src, NULL, FP8FLOW_POW2, &rows, NULL) == FP8FLOW_USAGE);

    // scales that are no powers of two: declared so, written so, or neither declared nor true
    EXPECT(fp8flow_quantize_rows(context, &src, NULL, FP8FLOW_FP32, &rows, NULL) == FP8FLOW_INTERNAL);
    EXPECT(said("declares scales pow2, and scale_format is fp32"));
    rows.scale_format = FP8FLOW_FP32;
    EXPECT(fp8flow_quantize_rows(context, &src, NULL, FP8FLOW_FP32, &rows, NULL) == FP8FLOW_OK);
    EXPECT(fp8flow_transpose_fp8(context, &rows, NULL, &columns, NULL) == FP8FLOW_USAGE &&
           said("fp32, want pow2"));
    rows.scale_format = FP8FLOW_UNDECLARED;
    EXPECT(fp8flow_transpose_fp8(context, &rows, NULL, &columns, NULL) == FP8FLOW_USAGE &&
           said("undeclared"));
    rows.scale_format = FP8FLOW_POW2;
    EXPECT(fp8flow_transpose_fp8(context, &rows, NULL, &columns, NULL) == FP8FLOW_USAGE &&
           said("that of row 0"));
    rows.scale_format = 3;
    EXPECT(fp8flow_transpose_fp8(context, &rows, NULL, &columns, NULL) == FP8FLOW_USAGE);
}

// Structs as version 1 had them, without a size, and reserved words in use.
static void other_versions(fp8flow_context* context) {
    static float x[128];
    static uint8_t codes[128];
    float scale;
    const struct {
        void* data;
        int32_t dtype, rank;
        int64_t dims[4];
    } old = {x, FP8FLOW_F32, 2, {1, 128, 0, 0}}, empty = {NULL, FP8FLOW_F32, 2, {0, 128, 0, 0}};
    const fp8flow_scaled rows = scaled(matrix(codes, FP8FLOW_E4M3, 1, 128), matrix(&scale, FP8FLOW_F32, 1, 1),
                                       FP8FLOW_VEC128, FP8FLOW_POW2);
    fp8flow_tensor newer = matrix(x, FP8FLOW_F32, 1, 128);
    const fp8flow_tensor* of_v1[] = {(const fp8flow_tensor*)&old, (const fp8flow_tensor*)&empty};
    for (int i = 0; i < 2; ++i) {
        EXPECT(fp8flow_quantize_rows(context, of_v1[i], NULL, FP8FLOW_POW2, &rows, NULL) == FP8FLOW_USAGE);
        EXPECT(said("src: size is") && said("another version of the C interface than 2"));
    }
    EXPECT(fp8flow_quantize_rows(context, &newer, NULL, FP8FLOW_POW2, &rows, NULL) == FP8FLOW_OK);
    newer.reserved[3] = 1;
    EXPECT(fp8flow_quantize_rows(context, &newer, NULL, FP8FLOW_POW2, &rows, NULL) == FP8FLOW_USAGE);
    EXPECT(said("src: a reserved word is 1"));
}

// A router that likes no expert, and experts whose weights are one value each: every row of y is
// silu(H w) * (H w) * F w, w = 1/H, and the gradient of w2 is known.
static void layer(fp8flow_context* context, int weight_dtype) {
    fp8flow_layer_spec spec = {.size = sizeof spec,
                               .hidden_size = H,
                               .ffn_hidden_size = F,
                               .num_experts = E,
                               .topk = K,
                               .max_tokens = T,
                               .recipe = "bf16",
                               .topk_scaling = 1,
                               .weight_dtype = weight_dtype};
    fp8flow_layer* one = NULL;
    spec.recipe = "fp4";
    EXPECT(fp8flow_layer_create(context, &spec, &one) == FP8FLOW_USAGE && one == NULL);
    EXPECT(strstr(fp8flow_last_error(), "fp4") != NULL);
    spec.recipe = "bf16", spec.topk_scaling = 0;  // left out: y would be 0
    EXPECT(fp8flow_layer_create(context, &spec, &one) == FP8FLOW_USAGE && said("scaling_factor is 0, want"));
    spec.topk_scaling = 1, spec.max_tokens = INT64_MAX / 2;  // the bytes of a tensor would not fit 64 bits
    EXPECT(fp8flow_layer_create(context, &spec, &one) == FP8FLOW_USAGE && said("max_tokens is"));
    spec.max_tokens = T;
    EXPECT(fp8flow_layer_create(context, &spec, &one) == FP8FLOW_OK);

    const size_t size = weight_dtype == FP8FLOW_F32 ? 4 : 2;
    static uint8_t router[E * H * 4], w1[E * 2 * F * H * 4], w2[E * H * F * 4], dw1[sizeof w1],
        dw2[sizeof w2];
    static float drouter[E * H];
    for (size_t i = 0; i < E * 2 * F * H; ++i) {
        const float value = 1.0F / H;
        const uint16_t narrow = bf16(value);
        const void* bytes = weight_dtype == FP8FLOW_F32 ? (const void*)&value : (const void*)&narrow;
        memcpy(w1 + i * size, bytes, size);
        if (i < E * H * F) memcpy(w2 + i * size, bytes, size);
    }
    static uint16_t x[T * H], y[T * H], dx[T * H];
    for (int i = 0; i < T * H; ++i) x[i] = bf16(1.0F);
    EXPECT(fp8flow_layer_forward(one, x, y, T, NULL) == FP8FLOW_USAGE);  // without weights
    const fp8flow_layer_weights weights = {.size = sizeof weights, .router = router, .w1 = w1, .w2 = w2};
    EXPECT(fp8flow_layer_set_weights(one, &weights, NULL) == FP8FLOW_OK);
    const fp8flow_layer_gradients gradients = {
        .size = sizeof gradients, .router = drouter, .w1 = dw1, .w2 = dw2};
    EXPECT(fp8flow_layer_backward(one, x, dx, &gradients, NULL) == FP8FLOW_USAGE);  // without a forward
    EXPECT(fp8flow_layer_forward(one, x, y, T, NULL) == FP8FLOW_OK);
    const float expected = 0.7310586F;  // silu(1)
    for (int i = 0; i < T * H; ++i)
        EXPECT(from_bf16(y[i]) > 0.99F * expected && from_bf16(y[i]) < 1.01F * expected);

    EXPECT(fp8flow_layer_backward(one, x, dx, &gradients, NULL) == FP8FLOW_OK);
    // dy is 1: every element of dw2 of a chosen expert is a sum over T tokens of silu(1) / K
    float value = 0;
    int64_t chosen = 0;
    for (size_t e = 0; e < E; ++e) {
        const uint8_t* at = dw2 + e * H * F * size;
        if (weight_dtype == FP8FLOW_F32)
            memcpy(&value, at, 4);
        else
            value = from_bf16((uint16_t)(at[0] | at[1] << 8));
        chosen += value != 0;
        EXPECT(value == 0 || (value > 0.99F * T * expected / K && value < 1.01F * T * expected / K));
    }
    EXPECT(chosen == K);
    EXPECT(fp8flow_layer_backward(one, x, dx, &gradients, NULL) == FP8FLOW_USAGE);  // once a forward
    EXPECT(fp8flow_layer_forward(one, x, y, -1, NULL) == FP8FLOW_USAGE && said("tokens is -1"));
    EXPECT(fp8flow_layer_forward(one, x, y, T + 1, NULL) == FP8FLOW_USAGE);
    EXPECT(strstr(fp8flow_last_error(), "max_tokens") != NULL);
    fp8flow_layer_destroy(one);
}

int main(void) {
    EXPECT(fp8flow_c_version() == FP8FLOW_C_VERSION);
    fp8flow_context* context = NULL;
    EXPECT(fp8flow_context_create("abacus", 0, &context) == FP8FLOW_USAGE && context == NULL);
    EXPECT(fp8flow_context_create("reference", 0, &context) == FP8FLOW_OK);
    if (context == NULL) return 1;
    EXPECT(strcmp(fp8flow_context_backend(context), "reference") == 0);
    quantize(context);
    other_versions(context);
    move_rows(context);
    layer(context, FP8FLOW_F32);
    layer(context, FP8FLOW_BF16);
    fp8flow_layer_destroy(NULL);
    fp8flow_context_destroy(context);
    if (failures == 0) printf("all as expected\n");
    return failures == 0 ? 0 : 1;
}
