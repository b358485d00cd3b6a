// SPDX-License-Identifier: MIT
// BatchFeed: the tokens of a micro-batch on their way to the device, without stopping the host. The host
// writes them into a page-locked slot, one asynchronous copy takes the slot to the device.
#pragma once

#include "kernels/core/pinned.h"
#include "kernels/core/tensor.h"
#include "model/data/data.h"

#include <vector>

namespace fp8flow::data {

class BatchFeed {
public:
    // Each of `num_slots` slots has the capacity for `max_tokens` tokens.
    BatchFeed(Device& device, int64_t seq_length, int64_t max_tokens, int64_t num_slots);
    static int64_t slot_bytes(int64_t max_tokens);
    ~BatchFeed();
    BatchFeed(const BatchFeed&) = delete;
    BatchFeed& operator=(const BatchFeed&) = delete;

    // The micro-batch on the device; the next load overwrites it, in the order of the stream.
    struct Batch {
        TensorView tokens, labels;  // [T] i32
    };
    // The host's half: the samples into the slot. The previous copy from it to the device must have
    // completed: the caller has waited for it.
    void fill(const TokenSource& data, Split split, const Batcher::Range& samples, int64_t slot);
    // The device's half. Of `samples` samples.
    Batch load(int64_t samples, int64_t slot, Stream stream);
    // One group of the T rows of the batch loaded last, row_capacity left to the caller.
    const RowGroups& all_tokens() const { return all_tokens_; }

private:
    Device& device_;
    int64_t seq_length_, max_tokens_;
    // A slot: group words, tokens, labels. Each begins at a multiple of 256 bytes.
    std::size_t labels_at_, slot_bytes_;
    PinnedBuffer slots_;
    uint8_t* batch_;  // on the device, laid out like a slot
    RowGroups all_tokens_;
    std::vector<int32_t> window_;
};

}  // namespace fp8flow::data
