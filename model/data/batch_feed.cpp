// SPDX-License-Identifier: MIT
// The layout of a slot, and its way to the device.
#include "model/data/batch_feed.h"

#include "kernels/core/error.h"
#include "kernels/core/scaled_tensor.h"

#include <algorithm>

namespace fp8flow::data {

namespace {

constexpr std::size_t kTokensAt = 256;  // after the group words: count, and the offsets 0 and count

std::size_t ids_bytes(int64_t tokens) {
    return to_size(round_up(tokens * static_cast<int64_t>(sizeof(int32_t)), 256));
}

}  // namespace

BatchFeed::BatchFeed(Device& device, int64_t seq_length, int64_t max_tokens, int64_t num_slots)
    : device_(device),
      seq_length_(seq_length),
      max_tokens_(max_tokens),
      labels_at_(kTokensAt + ids_bytes(max_tokens)),
      slot_bytes_(to_size(slot_bytes(max_tokens))),
      slots_(device, slot_bytes_ * to_size(num_slots)),
      batch_(static_cast<uint8_t*>(device.allocate(slot_bytes_))),
      all_tokens_{.num_groups = 1,
                  .counts = make_view(batch_, DType::i64, {1}),
                  .offsets = make_view(batch_ + sizeof(int64_t), DType::i64, {2}),
                  .alignment = kBlock},
      window_(to_size(seq_length + 1)) {
    std::fill_n(slots_.at<uint8_t>(0), slot_bytes_ * to_size(num_slots), uint8_t{0});
}

int64_t BatchFeed::slot_bytes(int64_t max_tokens) {
    return static_cast<int64_t>(kTokensAt + 2 * ids_bytes(max_tokens));
}

BatchFeed::~BatchFeed() { device_.free(batch_); }

void BatchFeed::fill(const TokenSource& data, Split split, const Batcher::Range& samples, int64_t slot) {
    const int64_t count = samples.count * seq_length_;
    FP8FLOW_CHECK(count <= max_tokens_, "{} tokens in a slot of {}", count, max_tokens_);
    const std::size_t start = slot_bytes_ * to_size(slot);
    int64_t* group = slots_.at<int64_t>(start);
    group[0] = count;
    group[1] = 0;
    group[2] = count;
    int32_t* tokens = slots_.at<int32_t>(start + kTokensAt);
    int32_t* labels = slots_.at<int32_t>(start + labels_at_);
    for (int64_t i = 0; i < samples.count; ++i) {
        data.sample(split, samples.first + i, window_);
        std::copy_n(window_.begin(), seq_length_, tokens + i * seq_length_);
        std::copy_n(window_.begin() + 1, seq_length_, labels + i * seq_length_);
    }
}

BatchFeed::Batch BatchFeed::load(int64_t samples, int64_t slot, Stream stream) {
    const int64_t count = samples * seq_length_;
    device_.copy_in_async(batch_, slots_.at<uint8_t>(slot_bytes_ * to_size(slot)), slot_bytes_, stream);
    return {make_view(batch_ + kTokensAt, DType::i32, {count}),
            make_view(batch_ + labels_at_, DType::i32, {count})};
}

}  // namespace fp8flow::data
