// SPDX-License-Identifier: MIT
// Frequencies of the rotary embedding. Sources: Su et al. 2021; Peng et al. 2023 (YaRN, NTK-aware);
// Llama 3.1.
#include "layers/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

namespace fp8flow {

namespace {

// YaRN's m(x): attention scaling with the length.
double yarn_mscale(const RopeSpec& rope, double x) {
    return rope.rotary_scaling_factor <= 1 ? 1.0 : 0.1 * x * std::log(rope.rotary_scaling_factor) + 1.0;
}

// The pair that makes `turns` rotations in the original length, as a real number.
double yarn_pair(const ModelSpec& model, int64_t rotated, double turns) {
    const double length = static_cast<double>(model.rope.original_max_position_embeddings);
    return static_cast<double>(rotated) * std::log(length / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(model.rotary_base));
}

// High frequencies stay, low frequencies are divided by the factor, with a ramp between them.
double yarn(const ModelSpec& model, int64_t rotated, int64_t pair, double frequency) {
    const RopeSpec& rope = model.rope;
    const double low = std::max(std::floor(yarn_pair(model, rotated, rope.beta_fast)), 0.0);
    double high =
        std::min(std::ceil(yarn_pair(model, rotated, rope.beta_slow)), static_cast<double>(rotated - 1));
    if (high == low) high += 0.001;
    const double ramp = std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
    return frequency / rope.rotary_scaling_factor * ramp + frequency * (1 - ramp);
}

double llama3(const RopeSpec& rope, double frequency) {
    const double length = static_cast<double>(rope.original_max_position_embeddings),
                 turns = length * frequency / (2 * std::numbers::pi);
    const double smooth =
        std::clamp((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0);
    return (1 - smooth) * frequency / rope.rotary_scaling_factor + smooth * frequency;
}

double frequency_of(const ModelSpec& model, int64_t rotated, int64_t pair) {
    const RopeSpec& rope = model.rope;
    double base = model.rotary_base;
    if (rope.rope_type == RopeType::ntk)
        base *= std::pow(rope.rotary_scaling_factor,
                         static_cast<double>(rotated) / static_cast<double>(rotated - 2));
    const double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(rotated));
    switch (rope.rope_type) {
        case RopeType::linear: return frequency / rope.rotary_scaling_factor;
        case RopeType::yarn: return yarn(model, rotated, pair, frequency);
        case RopeType::llama3: return llama3(rope, frequency);
        default: return frequency;
    }
}

}  // namespace

std::vector<int64_t> rope_rows(const RopeHead& head) {
    const int64_t half = (head.dim - head.first) / 2, turning = head.rotated / 2;
    std::vector<int64_t> rows(static_cast<size_t>(head.first));
    std::iota(rows.begin(), rows.end(), 0);
    for (int64_t side = 0; side < 2; ++side)
        for (int64_t i = 0; i < half; ++i)
            rows.push_back(head.first + (i >= turning       ? side * (half - turning) + i + turning
                                         : head.interleaved ? 2 * i + side
                                                            : i + side * turning));
    return rows;
}

std::vector<float> rope_table(const ModelSpec& model, int64_t length, int64_t dim, int64_t rotated) {
    const int64_t half = dim / 2;
    const double scale =
        model.rope.rope_type == RopeType::yarn
            ? yarn_mscale(model.rope, model.rope.mscale) / yarn_mscale(model.rope, model.rope.mscale_all_dim)
            : 1.0;
    std::vector<float> table(static_cast<size_t>(length * half * 2));
    for (int64_t position = 0; position < length; ++position) {
        for (int64_t i = 0; i < half; ++i) {
            const bool turns = i < rotated / 2;
            const double angle =
                turns ? static_cast<double>(position) * frequency_of(model, rotated, i) : 0.0;
            float* const entry = table.data() + (position * half + i) * 2;
            entry[0] = static_cast<float>(std::cos(angle) * (turns ? scale : 1.0));
            entry[1] = static_cast<float>(std::sin(angle) * (turns ? scale : 1.0));
        }
    }
    return table;
}

std::vector<float> rope_table(const ModelSpec& model) {
    return rope_table(model, model.seq_length, rope_dims(model), rotated_dims(model));
}

int64_t rope_dims(const ModelSpec& model) {
    return model.multi_latent_attention ? model.qk_pos_emb_head_dim : model.kv_channels;
}

double rope_softmax_factor(const RopeSpec& rope) {
    if (rope.rope_type != RopeType::yarn) return 1.0;
    const double m = yarn_mscale(rope, rope.mscale_all_dim);
    return m * m;
}

int64_t rotated_dims(const ModelSpec& model) {
    if (model.rope.rope_type == RopeType::none) return 0;
    return static_cast<int64_t>(static_cast<double>(rope_dims(model)) * model.rope.rotary_percent);
}

}  // namespace fp8flow
