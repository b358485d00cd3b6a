// SPDX-License-Identifier: MIT
// Embedding, cross-entropy and the element-wise operations of the reference backend.
#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace fp8flow {

namespace {

using reference::load_floats;
using reference::store_floats;
using reference::sum_in_halves;

constexpr int64_t kChunk = 1024;  // elements converted at a time

// Runs body(first, count) over [0, total) in chunks, in parallel.
template <class Body> void for_each_chunk(int64_t total, const Body& body) {
#pragma omp parallel for
    for (int64_t first = 0; first < total; first += kChunk) body(first, std::min(kChunk, total - first));
}

struct LossBlock {
    float largest, sum;
};

// The largest of a block's `count` logits and the sum of their exponentials below it, which are written to e.
LossBlock loss_block(const float* logits, int64_t count, float* e) {
    static_assert(op::kLossBlock == 8 * 4 * op::kLossLanes);
    float largest = std::numeric_limits<float>::lowest();
    for (int64_t i = 0; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    float v[op::kLossBlock] = {};
    for (int64_t i = 0; i < count; ++i) v[i] = exp_float(logits[i] - largest);
    std::copy_n(v, count, e);
    float lanes[op::kLossLanes];
    for (int64_t l = 0; l < op::kLossLanes; ++l) {
        float quads[8];
        for (int64_t j = 0; j < 8; ++j) {
            const float* of_lane = v + (j * op::kLossLanes + l) * 4;
            quads[j] = (of_lane[0] + of_lane[1]) + (of_lane[2] + of_lane[3]);
        }
        lanes[l] =
            ((quads[0] + quads[1]) + (quads[2] + quads[3])) + ((quads[4] + quads[5]) + (quads[6] + quads[7]));
    }
    return {largest, sum_in_halves<op::kLossLanes>(lanes)};
}

// Token ids come from data files, so they are checked before they become addresses.
void require_ids(const TensorView& ids, int64_t vocab_size, bool ignored_allowed) {
    const int32_t* id = ids.as<int32_t>();
    for (int64_t t = 0; t < ids.numel(); ++t)
        require(
            id[t] < vocab_size && (id[t] >= 0 || ignored_allowed), ExitCode::data,
            "token id {} at position {} of the batch is outside the vocabulary of {}; raise model.vocab_size",
            id[t], t, vocab_size);
}

}  // namespace

void ReferenceOps::do_embedding(const op::Embedding& args, const Launch&) {
    require_ids(args.ids, args.table.dim(0), false);
    const int32_t* ids = args.ids.as<int32_t>();
    const int64_t hidden = args.table.dim(1);
    reference::for_each_row(args.y.dim(0), hidden, [&](int64_t t, float* row) {
        load_floats(args.table, ids[t] * hidden, hidden, row);
        store_floats(args.y, t * hidden, hidden, row);
    });
}

void ReferenceOps::do_embedding_backward(const op::EmbeddingBackward& args, const Launch&) {
    require_ids(args.ids, args.dtable.dim(0), false);
    const int32_t* ids = args.ids.as<int32_t>();
    float* dtable = args.dtable.as<float>();
    const int64_t tokens = args.dy.dim(0), hidden = args.dtable.dim(1);
    if (args.mode == Gradient::overwrite) std::fill_n(dtable, args.dtable.numel(), 0.0f);
    // A thread owns columns, so that tokens with the same id are added in order.
    constexpr int64_t kColumns = 64;
#pragma omp parallel for
    for (int64_t column = 0; column < hidden; column += kColumns) {
        const int64_t width = std::min(kColumns, hidden - column);
        float part[kColumns];
        for (int64_t t = 0; t < tokens; ++t) {
            load_floats(args.dy, t * hidden + column, width, part);
            float* row = dtable + ids[t] * hidden + column;
            for (int64_t i = 0; i < width; ++i) row[i] += part[i];
        }
    }
}

void ReferenceOps::do_cross_entropy(const op::CrossEntropy& args, const Launch&) {
    require_ids(args.labels, args.vocab_size, true);
    const float* logits = args.logits.as<float>();
    const int32_t* labels = args.labels.as<int32_t>();
    float* loss = args.loss.as<float>();
    const int64_t columns = args.logits.dim(1), vocab = args.vocab_size;
    const float grad_scale = args.grad_scale;
#pragma omp parallel
    {
        std::vector<float> buffer(static_cast<std::size_t>(columns), 0.0f);  // stays zero past the vocabulary
        std::vector<LossBlock> blocks(static_cast<std::size_t>(ceil_div(vocab, op::kLossBlock)));
        float* p = buffer.data();
#pragma omp for
        for (int64_t t = 0; t < args.logits.dim(0); ++t) {
            const float* row = logits + t * columns;
            const int32_t label = labels[t];
            if (label < 0) {
                loss[t] = 0.0f;
                std::fill_n(p, vocab, 0.0f);
            } else {
                float largest = std::numeric_limits<float>::lowest();
                for (int64_t first = 0; first < vocab; first += op::kLossBlock) {
                    const LossBlock block =
                        loss_block(row + first, std::min(op::kLossBlock, vocab - first), p + first);
                    blocks[static_cast<std::size_t>(first / op::kLossBlock)] = block;
                    largest = std::max(largest, block.largest);
                }
                float lanes[op::kLossLanes] = {};
                for (std::size_t b = 0; b < blocks.size(); ++b) {
                    float& lane = lanes[b % op::kLossLanes];
                    lane = fma_float(blocks[b].sum, exp_float(blocks[b].largest - largest), lane);
                }
                const float sum = sum_in_halves<op::kLossLanes>(lanes);
                loss[t] = log_float(sum) + (largest - row[label]);
                if (!args.dlogits) continue;
                const float scale = div_float(grad_scale, sum);
                for (std::size_t b = 0; b < blocks.size(); ++b) {
                    const float factor = exp_float(blocks[b].largest - largest) * scale;
                    const int64_t first = static_cast<int64_t>(b) * op::kLossBlock;
                    for (int64_t i = first; i < std::min(vocab, first + op::kLossBlock); ++i) p[i] *= factor;
                }
                p[label] -= grad_scale;
            }
            if (args.dlogits) store_floats(args.dlogits, t * columns, columns, p);
        }
    }
}

void ReferenceOps::do_sum(const op::Sum& args, const Launch&) {
    const float* values = args.values.as<float>();
    const int64_t count = args.values.numel();
    double total = 0;
    for (int64_t first = 0; first < count; first += op::kSumBlock) {
        double block = 0;
        for (int64_t i = first; i < std::min(count, first + op::kSumBlock); ++i)
            block += static_cast<double>(values[i]);
        total += block;
    }
    float* sum = args.sum.as<float>();
    *sum = static_cast<float>(static_cast<double>(*sum) + total);
}

void ReferenceOps::do_add(const op::Add& args, const Launch&) {
    for_each_chunk(args.y.numel(), [&](int64_t first, int64_t count) {
        float a[kChunk], b[kChunk];
        load_floats(args.a, first, count, a);
        load_floats(args.b, first, count, b);
        for (int64_t i = 0; i < count; ++i) a[i] += b[i];
        store_floats(args.y, first, count, a);
    });
}

void ReferenceOps::do_cast(const op::Cast& args, const Launch&) {
    for_each_chunk(args.y.numel(), [&](int64_t first, int64_t count) {
        float values[kChunk];
        load_floats(args.x, first, count, values);
        store_floats(args.y, first, count, values);
    });
}

void ReferenceOps::do_zero(const op::Zero& args, const Launch&) {
    if (args.y.bytes() > 0) std::memset(args.y.data, 0, static_cast<std::size_t>(args.y.bytes()));
}

void ReferenceOps::do_fill_normal(const op::FillNormal& args, const Launch&) {
    const auto scale = static_cast<float>(args.standard_deviation);
    float* y = args.y.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < args.y.numel(); ++i)
        y[i] = scale * random_normal(args.seed, args.stream, static_cast<uint64_t>(args.first + i));
}

void ReferenceOps::do_count_non_finite(const op::CountNonFinite& args, const Launch&) {
    constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
    int64_t found = 0, lowest = kNone;
    const int64_t total = args.x.numel();
#pragma omp parallel for reduction(+ : found) reduction(min : lowest)
    for (int64_t start = 0; start < total; start += kChunk) {
        const int64_t count = std::min(kChunk, total - start);
        float values[kChunk];
        load_floats(args.x, start, count, values);
        for (int64_t i = 0; i < count; ++i) {
            if ((float_bits(values[i]) & 0x7F800000u) != 0x7F800000u) continue;
            ++found;
            lowest = std::min(lowest, start + i);
        }
    }
    if (found == 0) return;
    *args.count.as<int64_t>() += found;
    int64_t* first = args.first.as<int64_t>();
    *first = *first < 0 ? lowest : std::min(*first, lowest);
}

}  // namespace fp8flow
