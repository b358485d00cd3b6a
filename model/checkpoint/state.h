// SPDX-License-Identifier: MIT
// The state of a training run as named tensors: FP32 weights, both moments, expert biases, delayed scales.
// Experts are tensors of their own under their global number, so a name means the same for every number of
// ranks, and a checkpoint fits any. State that ranks share (use_distributed_optimizer) is saved as slices,
// each by the rank that has it; they are read as the whole tensor. The working copies of weights follow from
// the FP32 ones and are not part of it. Read next: saver.h, reader.h.
#pragma once

#include "model/safetensors/header.h"
#include "model/train/transformer.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::checkpoint {

// Ranks that share the experts are neighbours: rank % expert_parallel_size says which experts a rank has.
struct RankLayout {
    int64_t rank = 0, world_size = 1, expert_parallel_size = 1;

    int64_t expert_parallel_rank() const { return rank % expert_parallel_size; }
};

struct StateTensor {
    std::string name;              // "exp_avg.layers.1.moe.experts.3.linear_fc1.weight"
    std::vector<int64_t> shape;    // of the whole tensor
    int64_t first = 0, count = 0;  // elements of it that this entry is
    int64_t holder = -1;           // the expert-parallel rank that has it; -1: all ranks
    int64_t owner = -1;            // the rank that saves it; the sums of bytes are about equal
    TensorView view;           // [first, first + count) on this rank's device; absent where another has it
    DType dtype = DType::f32;  // f32 | bf16

    int64_t bytes() const { return count * size_of(dtype); }
    int64_t numel() const;
    bool is_slice() const { return count != numel(); }
    // The name in a file: of a slice, SliceName's; and its shape there.
    std::string stored_name() const;
    std::vector<int64_t> stored_shape() const;
    // Of which type a file may hold it: moments, of either, whatever this run keeps them in.
    bool may_be_read_from(FileDType file_dtype) const;
};
FileDType file_dtype(DType dtype);

// "exp_avg.layers.0.router.weight[64:128 of 8x256]": elements 64 to 127, in row-major order, of a tensor [8,
// 256].
struct SliceName {
    std::string tensor;
    std::vector<int64_t> shape;
    int64_t first = 0, last = 0;

    std::string text() const;
};
// Nothing where `name` is no such name, exactly as text() writes it.
std::optional<SliceName> parse_slice_name(const std::string& name);

// All tensors of the model, those of other ranks too: the same list on every rank, but for the views.
// Prefixes as in Megatron's checkpoints: fp32_param., exp_avg., exp_avg_sq.; none before expert biases and
// delayed scales.
std::vector<StateTensor> training_state(Transformer& transformer, const RankLayout& layout);
// What a start with weights alone takes (checkpoint.finetune): weights, and the expert biases, which choose
// experts as weights do.
bool is_weight(const std::string& state_name);
bool is_moment(const std::string& state_name);

}  // namespace fp8flow::checkpoint
