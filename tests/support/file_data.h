// SPDX-License-Identifier: MIT
// The settings of a source that reads files, by name: other keys of the configuration have their defaults.
// And what a source has at an index.
#pragma once

#include "model/config/config.h"
#include "model/data/data.h"

#include <string>
#include <vector>

namespace fp8flow {

struct FileData {
    std::vector<std::string> data_path = {};
    std::vector<std::string> extensions = {};
    int64_t max_bytes = int64_t{1} << 30;
    double held_out_fraction = 0.1;
    int64_t vocab_size = 50257, seq_length = 256;
    uint64_t seed = 1;

    operator Config() const {
        Config config;
        config.data.data_path = data_path;
        config.data.file_extensions = extensions;
        config.data.max_bytes = max_bytes;
        config.data.held_out_fraction = held_out_fraction;
        config.model.vocab_size = vocab_size;
        config.model.seq_length = seq_length;
        config.training.seed = seed;
        return config;
    }
};

inline std::vector<int32_t> tokens_of(const data::TokenSource& source, data::Split split, int64_t index) {
    std::vector<int32_t> tokens(static_cast<size_t>(source.seq_length()) + 1, -1);
    source.sample(split, index, tokens);
    return tokens;
}

}  // namespace fp8flow
