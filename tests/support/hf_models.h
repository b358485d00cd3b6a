// SPDX-License-Identifier: MIT
// Files with Hugging Face names made by hand, their values telling tensor, row and column; and the whole
// models that tests load and export.
#pragma once

#include "model/config/config.h"
#include "model/safetensors/writer.h"
#include "tests/support/files.h"
#include "tests/support/layers/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace fp8flow::test {

struct HandMade {
    TensorDeclaration tensor;
    std::function<double(int64_t row, int64_t col)> value;  // of the tensor seen as [all rows, cols]
};

inline std::string encoded(FileDType dtype, double value) {
    std::string bytes(static_cast<size_t>(size_of(dtype)), '\0');
    const auto f = static_cast<float>(value);
    if (dtype == FileDType::bf16) {
        const Bf16 b = to_bf16(f);
        std::memcpy(bytes.data(), &b, sizeof b);
    } else if (dtype == FileDType::e4m3) {
        bytes[0] = static_cast<char>(to_e4m3(f).bits);
    } else {
        EXPECT_EQ(dtype, FileDType::f32);
        std::memcpy(bytes.data(), &f, sizeof f);
    }
    return bytes;
}

inline std::string write_file(const TemporaryFolder& folder, const std::string& name,
                              const std::vector<HandMade>& tensors) {
    std::string file;
    std::vector<TensorDeclaration> declarations;
    for (const HandMade& made : tensors) declarations.push_back(made.tensor);
    SafetensorsWriter writer(declarations, {{"format", "pt"}}, [&](const void* data, size_t bytes) {
        file.append(static_cast<const char*>(data), bytes);
    });
    for (const HandMade& made : tensors) {
        const int64_t cols = made.tensor.shape.size() < 2 ? 1 : made.tensor.shape.back();
        const int64_t rows = *checked_bytes(FileDType::u8, made.tensor.shape) / cols;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c) {
                const std::string bytes = encoded(made.tensor.dtype, made.value(r, c));
                writer.append(made.tensor.name, bytes.data(), static_cast<int64_t>(bytes.size()));
            }
    }
    writer.finish();
    return folder.write(name, file);
}

// Small integers that differ between tensors, rows and columns, and that BF16 holds.
inline HandMade marked(const std::string& name, std::vector<int64_t> shape, int tag) {
    return {{name, FileDType::bf16, std::move(shape)}, [tag](int64_t r, int64_t c) {
                return static_cast<double>((tag * 37 + r * 5 + c * 3) % 251 - 125);
            }};
}
inline float mark(int tag, int64_t r, int64_t c) {
    return static_cast<float>((tag * 37 + r * 5 + c * 3) % 251 - 125);
}

constexpr int64_t kH = 128, kF = 128, kE = 4;

inline void on_one_rank(const std::function<void(ProcessGroup&)>& body) { run_thread_ranks(1, 60, body); }

inline float at(const TensorView& view, int64_t i) { return view.as<float>()[i]; }

inline Parameter& parameter_of(ParameterStore& store, const std::string& ending) {
    for (Parameter& p : store.all())
        if (p.spec.name.ends_with(ending)) return p;
    throw std::runtime_error("no parameter " + ending);
}

// gate, up, down of all experts under the given names; {} is the expert's number.
inline std::vector<HandMade> experts(const std::string& gate, const std::string& up,
                                     const std::string& down) {
    std::vector<HandMade> all;
    for (int64_t e = 0; e < kE; ++e) {
        const int tag = static_cast<int>(10 * e);
        all.push_back(marked(fmt::format(fmt::runtime(gate), e), {kF, kH}, tag + 1));
        all.push_back(marked(fmt::format(fmt::runtime(up), e), {kF, kH}, tag + 2));
        all.push_back(marked(fmt::format(fmt::runtime(down), e), {kH, kF}, tag + 3));
    }
    return all;
}

inline LayerCase whole_model(bool qwen) {
    LayerCase c = LayerCase::of(Recipe::fp8_flow);
    c.forced_routing = false;
    c.model.attention = true;
    c.model.num_layers = 2;
    c.model.qk_layernorm = qwen;
    c.model.moe_layer_freq = qwen ? std::vector<int>{0, 1} : std::vector<int>{1, 1};
    return c;
}
inline Config config_of(const LayerCase& c) {
    Config config;
    config.model = c.model;
    config.moe = c.moe;
    return config;
}

}  // namespace fp8flow::test
