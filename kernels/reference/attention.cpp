// SPDX-License-Identifier: MIT
// Attention of the reference backend: rotary embedding, causal attention with grouped queries and its
// backward, and the copies between the packed projection and q, k, v. GEMMs run on FP32 copies of one head
// and vectorise across outputs only.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fp8flow {

namespace {

using reference::for_each_row;
using reference::lane_dot;
using reference::lane_sum;
using reference::load_floats;
using reference::rotate_pairs;
using reference::store_floats;

constexpr int64_t kWidth = 16;       // rows of the fp32 copies are padded to this: inner loops have no tail
constexpr int64_t kQueryBlock = 32;  // query rows with scores in memory at a time

// c[0, n) += sum over ascending k in [first, last) of a[k * a_stride] * b[k][0, n): one fma per term. n is a
// multiple of kWidth. Eight terms at a time save loads and stores of c; every c[x] sees its terms in order.
void multiply_add(const float* a, int64_t a_stride, const float* b, int64_t ldb, int64_t first, int64_t last,
                  float* c, int64_t n) {
    constexpr int64_t kTerms = 8;
    int64_t k = first;
    for (; k + kTerms <= last; k += kTerms) {
        float factor[kTerms];
        for (int64_t i = 0; i < kTerms; ++i) factor[i] = a[(k + i) * a_stride];
        const float* b_row = b + k * ldb;
#pragma omp simd
        for (int64_t x = 0; x < n; ++x) {
            float sum = c[x];
            for (int64_t i = 0; i < kTerms; ++i) sum = fma_float(factor[i], b_row[i * ldb + x], sum);
            c[x] = sum;
        }
    }
    for (; k < last; ++k) {
        const float factor = a[k * a_stride];
        const float* b_row = b + k * ldb;
#pragma omp simd
        for (int64_t x = 0; x < n; ++x) c[x] = fma_float(factor, b_row[x], c[x]);
    }
}

// c[m, n] = a[m, depth] b[depth, n].
void matmul(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t m, int64_t n, int64_t depth,
            float* c, int64_t ldc) {
    for (int64_t row = 0; row < m; ++row) {
        std::fill_n(c + row * ldc, n, 0.0f);
        multiply_add(a + row * lda, 1, b, ldb, 0, depth, c + row * ldc, n);
    }
}

std::vector<float> buffer(int64_t size) { return std::vector<float>(static_cast<std::size_t>(size)); }

// Which keys a query of one sequence sees: [first[i], i] at position i; and which queries see a key: [i,
// end[i]).
struct Visible {
    const int64_t *first, *end;
};

// c[i] = sum over the keys j that row i sees of weights[i][j] * b[j]; the position of row i is first_position
// + i. No other key is read, so that even a NaN at a later position cannot reach an earlier one.
void multiply_causal(const float* weights, int64_t ld, int64_t m, int64_t first_position,
                     const Visible& visible, const float* b, int64_t n, float* c) {
    std::fill_n(c, m * n, 0.0f);
    for (int64_t row = 0; row < m; ++row) {
        const int64_t position = first_position + row;
        multiply_add(weights + row * ld, 1, b, n, visible.first[position], position + 1, c + row * n, n);
    }
}

// c[j] += sum over ascending rows i of the block that see key j of weights[i][j] * b[i]: the transposed GEMM
// of the backward.
void add_transposed_causal(const float* weights, int64_t ld, int64_t m, int64_t first_position,
                           const Visible& visible, const float* b, int64_t n, float* c) {
    for (int64_t key = visible.first[first_position]; key < first_position + m; ++key)
        multiply_add(weights + key, ld, b, n, std::max<int64_t>(key - first_position, 0),
                     std::min(visible.end[key] - first_position, m), c + key * n, n);
}

// One head of rows [first_row, first_row + count) of a [T, heads, D] tensor as fp32 [count, ld]; columns past
// D are zero.
void load_head(const TensorView& view, int64_t first_row, int64_t count, int64_t head, int64_t ld,
               float* out) {
    const int64_t heads = view.dim(1), depth = view.dim(2);
    for (int64_t row = 0; row < count; ++row) {
        load_floats(view, ((first_row + row) * heads + head) * depth, depth, out + row * ld);
        std::fill(out + row * ld + depth, out + (row + 1) * ld, 0.0f);
    }
}
void store_head(const TensorView& view, int64_t first_row, int64_t count, int64_t head, int64_t ld,
                const float* values) {
    const int64_t heads = view.dim(1), depth = view.dim(2);
    for (int64_t row = 0; row < count; ++row)
        store_floats(view, ((first_row + row) * heads + head) * depth, depth, values + row * ld);
}

// in [rows, ld] -> out [columns, out_ld]; columns past `rows` stay as they are (zero).
void transpose(const float* in, int64_t rows, int64_t columns, int64_t ld, float* out, int64_t out_ld) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column)
            out[column * out_ld + row] = in[row * ld + column];
}

// What is the same for every head: sizes, sizes padded to whole inner loops, and which keys a query sees.
class HeadShape {
public:
    template <class Args>
    explicit HeadShape(const Args& args)
        : length(args.seq_length),
          depth(args.q.dim(2)),
          value_depth(args.v.dim(2)),
          heads(args.q.dim(1)),
          kv_heads(args.k.dim(1)),
          sequences(args.q.dim(0) / length),
          padded_depth(round_up(depth, kWidth)),
          padded_values(round_up(value_depth, kWidth)),
          padded_length(round_up(length, kWidth)),
          first_(static_cast<std::size_t>(sequences * length)),
          end_(first_.size()) {
        const int64_t rows = sequences * length;
        const std::vector<int64_t> whole = {0, rows};
        const int64_t* documents = args.documents ? args.documents.template as<int64_t>() : whole.data();
        const int64_t count = args.documents ? args.documents.dim(0) - 1 : 1;
        require(documents[0] == 0 && documents[count] == rows, ExitCode::usage,
                "documents of attention are rows {} to {}, not 0 to {}", documents[0], documents[count],
                rows);
        for (int64_t i = 0; i < count; ++i) {
            require(documents[i] <= documents[i + 1] && documents[i + 1] <= rows, ExitCode::usage,
                    "document {} of attention is rows {} to {} of {}", i, documents[i], documents[i + 1],
                    rows);
            for (int64_t row = documents[i]; row < documents[i + 1]; ++row) {
                const int64_t start = row / length * length;
                first_[static_cast<std::size_t>(row)] = std::max(documents[i] - start, int64_t{0});
                end_[static_cast<std::size_t>(row)] = std::min(documents[i + 1] - start, length);
            }
        }
    }
    Visible visible(int64_t first_row) const { return {first_.data() + first_row, end_.data() + first_row}; }

    int64_t length, depth, value_depth, heads, kv_heads, sequences;
    int64_t padded_depth, padded_values, padded_length;

private:
    std::vector<int64_t> first_, end_;  // [T], positions in the row's sequence
};

// Scores of queries [m, D] against the keys up to the last query's position, scaled; s has rows of
// padded_length.
void scaled_scores(const HeadShape& shape, const float* q, const float* k_transposed, int64_t m, int64_t keys,
                   float scale, float* s) {
    matmul(q, shape.padded_depth, k_transposed, shape.padded_length, m, round_up(keys, kWidth), shape.depth,
           s, shape.padded_length);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t key = 0; key < keys; ++key) s[row * shape.padded_length + key] *= scale;
}

// values[j] = exp(values[j] - shift)
void exp_shifted(float* values, int64_t count, float shift) {
    for (int64_t i = 0; i < count; ++i) values[i] = exp_float(values[i] - shift);
}

// Calls copy(packed, part, bytes) for the q, k and v of every row.
template <class Args, class Copy> void each_part(const Args& args, Copy copy) {
    const int64_t row_bytes = args.qkv.cols() * size_of(args.qkv.dtype);
#pragma omp parallel for
    for (int64_t t = 0; t < args.qkv.dim(0); ++t) {
        uint8_t* packed = args.qkv.bytes_ptr() + t * row_bytes;
        for (const TensorView* part : {&args.q, &args.k, &args.v}) {
            if (!*part) continue;
            const int64_t bytes = part->dim(1) * part->dim(2) * size_of(part->dtype);
            copy(packed, part->bytes_ptr() + t * bytes, static_cast<std::size_t>(bytes));
            packed += bytes;
        }
    }
}

}  // namespace

void ReferenceOps::do_rope(const op::Rope& args, const Launch&) {
    const int64_t tokens = args.x.dim(0), heads = args.x.dim(1), depth = args.x.dim(2);
    const int64_t length = args.table.dim(0);
    const float* table = args.table.as<float>();
    const float sign = args.direction == op::RopeDirection::forward ? 1.0f : -1.0f;
    for_each_row(tokens, heads * depth, [&](int64_t t, float* row) {
        const float* angles = table + t % length * depth;
        load_floats(args.x, t * heads * depth, heads * depth, row);
        for (int64_t head = 0; head < heads; ++head) rotate_pairs(row + head * depth, depth, angles, sign);
        store_floats(args.x, t * heads * depth, heads * depth, row);
    });
}

void ReferenceOps::do_attention(const op::Attention& args, const Launch&) {
    if (args.q.numel() == 0) return;
    const HeadShape shape(args);
    const int64_t length = shape.length, ld = shape.padded_depth, value_ld = shape.padded_values,
                  group = shape.heads / shape.kv_heads;
    float* lse = args.lse.as<float>();
#pragma omp parallel
    {
        auto k = buffer(length * ld), v = buffer(length * value_ld),
             k_transposed = buffer(ld * shape.padded_length);
        auto q = buffer(kQueryBlock * ld), o = buffer(kQueryBlock * value_ld),
             p = buffer(kQueryBlock * shape.padded_length);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < shape.sequences * shape.heads; ++task) {
            const int64_t head = task % shape.heads, first_row = task / shape.heads * length;
            load_head(args.k, first_row, length, head / group, ld, k.data());
            load_head(args.v, first_row, length, head / group, value_ld, v.data());
            const Visible visible = shape.visible(first_row);
            transpose(k.data(), length, shape.depth, ld, k_transposed.data(), shape.padded_length);
            for (int64_t first = 0; first < length; first += kQueryBlock) {
                const int64_t m = std::min(kQueryBlock, length - first);
                load_head(args.q, first_row + first, m, head, ld, q.data());
                scaled_scores(shape, q.data(), k_transposed.data(), m, first + m, args.scale, p.data());
                float sums[kQueryBlock];
                for (int64_t row = 0; row < m; ++row) {
                    float* s = p.data() + row * shape.padded_length;
                    const int64_t from = visible.first[first + row], keys = first + row + 1 - from;
                    s += from;
                    float largest = -INFINITY;
                    for (int64_t key = 0; key < keys; ++key) largest = s[key] > largest ? s[key] : largest;
                    exp_shifted(s, keys, largest);
                    sums[row] = lane_sum(s, keys);
                    lse[(first_row + first + row) * shape.heads + head] = largest + log_float(sums[row]);
                }
                multiply_causal(p.data(), shape.padded_length, m, first, visible, v.data(), value_ld,
                                o.data());
                for (int64_t row = 0; row < m; ++row)
                    for (int64_t d = 0; d < value_ld; ++d)
                        o[static_cast<std::size_t>(row * value_ld + d)] /= sums[row];
                store_head(args.o, first_row + first, m, head, value_ld, o.data());
            }
        }
    }
}

void ReferenceOps::do_attention_backward(const op::AttentionBackward& args, const Launch&) {
    if (args.q.numel() == 0) return;
    const HeadShape shape(args);
    const int64_t length = shape.length, ld = shape.padded_depth, value_ld = shape.padded_values,
                  group = shape.heads / shape.kv_heads;
    const int64_t score_ld = shape.padded_length;
    const float* lse = args.lse.as<float>();
    // One task owns a kv head, so that its gradient is summed over the query heads by one thread, in order.
#pragma omp parallel
    {
        auto k = buffer(length * ld), v = buffer(length * value_ld), dk = buffer(length * ld),
             dv = buffer(length * value_ld);
        auto k_transposed = buffer(ld * score_ld), v_transposed = buffer(value_ld * score_ld);
        auto q = buffer(kQueryBlock * ld), o = buffer(kQueryBlock * value_ld),
             dout = buffer(kQueryBlock * value_ld), dq = buffer(kQueryBlock * ld);
        auto p = buffer(kQueryBlock * score_ld), ds = buffer(kQueryBlock * score_ld);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < shape.sequences * shape.kv_heads; ++task) {
            const int64_t kv_head = task % shape.kv_heads, first_row = task / shape.kv_heads * length;
            load_head(args.k, first_row, length, kv_head, ld, k.data());
            load_head(args.v, first_row, length, kv_head, value_ld, v.data());
            const Visible visible = shape.visible(first_row);
            transpose(k.data(), length, shape.depth, ld, k_transposed.data(), score_ld);
            transpose(v.data(), length, shape.value_depth, value_ld, v_transposed.data(), score_ld);
            std::fill(dk.begin(), dk.end(), 0.0f);
            std::fill(dv.begin(), dv.end(), 0.0f);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
                for (int64_t first = 0; first < length; first += kQueryBlock) {
                    const int64_t m = std::min(kQueryBlock, length - first), row0 = first_row + first,
                                  keys = first + m;
                    load_head(args.q, row0, m, head, ld, q.data());
                    load_head(args.o, row0, m, head, value_ld, o.data());
                    load_head(args.dout, row0, m, head, value_ld, dout.data());
                    scaled_scores(shape, q.data(), k_transposed.data(), m, keys, args.scale, p.data());
                    matmul(dout.data(), value_ld, v_transposed.data(), score_ld, m, round_up(keys, kWidth),
                           shape.value_depth, ds.data(), score_ld);
                    for (int64_t row = 0; row < m; ++row) {
                        const int64_t from = visible.first[first + row], keys_seen = first + row + 1 - from;
                        float* p_row = p.data() + row * score_ld + from;
                        float* ds_row = ds.data() + row * score_ld + from;
                        const float delta = lane_dot(dout.data() + row * value_ld, o.data() + row * value_ld,
                                                     shape.value_depth);
                        exp_shifted(p_row, keys_seen, lse[(row0 + row) * shape.heads + head]);
                        for (int64_t key = 0; key < keys_seen; ++key)
                            ds_row[key] = p_row[key] * (ds_row[key] - delta) * args.scale;
                    }
                    multiply_causal(ds.data(), score_ld, m, first, visible, k.data(), ld, dq.data());
                    store_head(args.dq, row0, m, head, ld, dq.data());
                    add_transposed_causal(p.data(), score_ld, m, first, visible, dout.data(), value_ld,
                                          dv.data());
                    add_transposed_causal(ds.data(), score_ld, m, first, visible, q.data(), ld, dk.data());
                }
            }
            store_head(args.dk, first_row, length, kv_head, ld, dk.data());
            store_head(args.dv, first_row, length, kv_head, value_ld, dv.data());
        }
    }
}

void ReferenceOps::do_split_qkv(const op::SplitQkv& args, const Launch&) {
    each_part(args,
              [](uint8_t* packed, uint8_t* part, std::size_t bytes) { std::memcpy(part, packed, bytes); });
    if (!args.bias) return;
    const float* bias = args.bias.as<float>();
    for (const TensorView* part : {&args.q, &args.k, &args.v}) {
        if (!*part) break;
        const int64_t width = part->dim(1) * part->dim(2);
        std::vector<float> row(static_cast<std::size_t>(width));
        for (int64_t t = 0; t < part->dim(0); ++t) {
            load_floats(*part, t * width, width, row.data());
            for (int64_t i = 0; i < width; ++i) row[static_cast<std::size_t>(i)] += bias[i];
            store_floats(*part, t * width, width, row.data());
        }
        bias += width;
    }
}

void ReferenceOps::do_merge_qkv(const op::MergeQkv& args, const Launch&) {
    each_part(args,
              [](uint8_t* packed, uint8_t* part, std::size_t bytes) { std::memcpy(packed, part, bytes); });
    if (!args.dbias) return;
    const int64_t rows = args.qkv.dim(0), width = args.qkv.cols();
    const auto w = static_cast<std::size_t>(width);
    std::vector<float> row(w), chunk(w), sums(w, 0.0f);
    for (int64_t first = 0; first < op::kBiasChunks; ++first) {
        std::fill(chunk.begin(), chunk.end(), 0.0f);
        for (int64_t t = first; t < rows; t += op::kBiasChunks) {
            load_floats(args.qkv, t * width, width, row.data());
            for (std::size_t i = 0; i < w; ++i) chunk[i] += row[i];
        }
        for (std::size_t i = 0; i < w; ++i) sums[i] += chunk[i];
    }
    float* dbias = args.dbias.as<float>();
    for (std::size_t i = 0; i < w; ++i)
        dbias[i] = args.dbias_mode == Gradient::accumulate ? dbias[i] + sums[i] : sums[i];
}

}  // namespace fp8flow
