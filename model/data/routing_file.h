// SPDX-License-Identifier: MIT
// The experts of every token of a run, in a safetensors file (train --record-routing, --routing; replay
// --routing). For each MoE layer N one tensor "layers.N.moe.router.ids" [tokens, K] I16: what inference
// engines return. Row sample * seq_length + position, with samples numbered as the Batcher deals them, so
// that steps, micro-batches and ranks do not matter. Metadata: num_experts. A file that a run records also
// has "recorded" [samples] U8, 1 where a sample was written, and the fingerprints of the data with their
// order, and of the output folder of the run.
#pragma once

#include "model/safetensors/file.h"

#include <span>
#include <string>
#include <vector>

namespace fp8flow::data {

struct RoutingShape {
    std::vector<int64_t> layers;  // numbers of the MoE layers
    int64_t tokens = 0, topk = 0, num_experts = 0;
    int64_t seq_length = 0;  // tokens of a sample
    uint64_t data = 0;       // order_fingerprint(); 0: not of a run
};

// A file that was given. All errors are Error(data) and name what the file has and what is wanted.
class GivenRouting {
public:
    // The file has at least shape.tokens; exactly as many where shape.data is 0.
    GivenRouting(const std::string& path, const RoutingShape& shape);
    // A run that is resumed after a rollback may need more tokens than shape.tokens. Refuses a file that has
    // fewer now, not when the run comes to its end.
    void require_after_rollback(int64_t wanted) const;
    // ids [ids.size() / K, K] of the rows from `row` on, in the layer of this index. Refuses rows that were
    // not recorded, and ids that are out of range or twice in a row.
    void read(size_t layer, int64_t row, std::span<int32_t> ids) const;

private:
    int64_t tokens() const { return std::ssize(ids_[0]) / 2 / shape_.topk; }

    SafetensorsFile file_;
    RoutingShape shape_;
    std::vector<std::span<const uint8_t>> ids_;
    std::span<const uint8_t> recorded_;  // empty: every row is there
};

// A file that is recorded. It has its full size from the start; samples fill it in any order.
class RecordedRouting {
public:
    // Makes the file if `makes_file`, otherwise another rank has made it. A run that continues goes on in
    // its own file. One that `resumes`, and found no checkpoint, replaces what the same `run` began to
    // record. Throws Error(output) where the file exists otherwise, or is that of another run.
    struct Options {
        bool makes_file = true, continues = false, resumes = false;
        std::string recipe;
        std::string run;  // the same after a restart; empty: not known
    };
    RecordedRouting(const std::string& path, const RoutingShape& shape, const Options& options);
    // ids [seq_length, K] of a sample.
    void write(size_t layer, int64_t sample, std::span<const int32_t> ids);
    void mark(int64_t sample);                         // all its layers are written
    const std::string& note() const { return note_; }  // what was replaced; empty: nothing

private:
    enum class IfThere : uint8_t { is_refused, is_continued, is_replaced };
    void make_file(const std::string& header, int64_t bytes, IfThere if_there);
    void write_at(int64_t offset, const void* data, int64_t bytes) const;
    void check(bool done, const char* what) const;  // throws Error(output) with the system's reason

    std::string path_, note_;
    RoutingShape shape_;
    SafetensorsHeader header_;
    Descriptor file_;
    std::vector<int16_t> narrow_;  // ids of a sample
};

}  // namespace fp8flow::data
