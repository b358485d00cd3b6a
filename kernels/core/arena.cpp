// SPDX-License-Identifier: MIT
// Arena: chunks of memory, with bytes counted by category.
#include "kernels/core/arena.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <utility>

namespace fp8flow {

namespace {
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;
}  // namespace

Arena::Arena(Device& device, std::string name, bool poison, Order order)
    : device_(device), name_(std::move(name)), poison_(poison), order_(order) {}

Arena::~Arena() { free_chunks(); }

void Arena::join() {
    if (!log_.empty() || chunks_.size() < 2) return;
    device_.synchronize();
    free_chunks();
    add_chunk(static_cast<std::size_t>(deepest_));
}

void Arena::release(int64_t expected) {
    FP8FLOW_CHECK(log_.empty(), "arena {}: {} allocations are live", name_, log_.size());
    free_chunks();
    deepest_ = 0;
    expected_ = expected;
}

void Arena::add_chunk(std::size_t bytes) {
    const std::size_t size = std::max({bytes, kChunkBytes, static_cast<std::size_t>(expected_)});
    expected_ = 0;
    chunks_.push_back({device_.allocate(size), size});
    ++num_growths_;
}

void Arena::free_chunks() {
    for (const Chunk& chunk : chunks_) device_.free(chunk.data);
    chunks_.clear();
    chunk_ = 0;
}

void* Arena::allocate(std::size_t bytes, const char* category) {
    bytes = std::max<std::size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
    const auto has_room = [bytes](const Chunk& chunk) { return chunk.size - chunk.used >= bytes; };
    if (order_ == Order::first_fit) chunk_ = 0;
    while (chunk_ < chunks_.size() && !has_room(chunks_[chunk_])) {
        ++chunk_;
        if (order_ == Order::stack && chunk_ < chunks_.size()) chunks_[chunk_].used = 0;
    }
    if (chunk_ == chunks_.size()) add_chunk(bytes);
    Chunk& chunk = chunks_[chunk_];
    void* data = static_cast<uint8_t*>(chunk.data) + chunk.used;
    chunk.used += bytes;
    log_.push_back({category, static_cast<int64_t>(bytes)});
    bytes_in_use_ += static_cast<int64_t>(bytes);
    interval_peak_ = std::max(interval_peak_, bytes_in_use_);
    deepest_ = std::max(deepest_, bytes_in_use_);
    if (bytes_in_use_ > peak_bytes_) {
        peak_bytes_ = bytes_in_use_;
        peak_by_category_.clear();  // the log holds it until the next rewind
    }
    if (poison_) device_.fill(data, 0xFF, bytes);
    return data;
}

TensorView Arena::tensor(DType dtype, std::initializer_list<int64_t> shape, const char* category) {
    TensorView view = make_view(nullptr, dtype, shape);
    view.data = allocate(static_cast<std::size_t>(view.bytes()), category);
    return view;
}

ScaledTensor Arena::fp8(DType dtype, std::initializer_list<int64_t> shape, ScaleLayout layout,
                        const char* category, int64_t groups) {
    ScaledTensor result;
    result.data = tensor(dtype, shape, category);
    result.layout = layout;
    if (layout == ScaleLayout::none) return result;
    const ScaleShape s = scale_shape(layout, result.data, groups);
    if (s.rank == 1) result.scales = tensor(s.dtype, {s.dims[0]}, category);
    if (s.rank == 2) result.scales = tensor(s.dtype, {s.dims[0], s.dims[1]}, category);
    if (s.rank == 3) result.scales = tensor(s.dtype, {s.dims[0], s.dims[1], s.dims[2]}, category);
    return result;
}

Arena::Mark Arena::mark() const {
    return {chunk_, chunk_ < chunks_.size() ? chunks_[chunk_].used : 0, log_.size()};
}

void Arena::rewind(const Mark& mark) {
    FP8FLOW_CHECK(order_ == Order::stack, "arena {}: what is allocated stays", name_);
    FP8FLOW_CHECK(mark.log <= log_.size(), "arena {}: rewind to {} allocations, {} are live", name_, mark.log,
                  log_.size());
    if (mark.log < log_.size() && peak_by_category_.empty()) peak_by_category_ = by_category();
    while (log_.size() > mark.log) {
        bytes_in_use_ -= log_.back().bytes;
        log_.pop_back();
    }
    chunk_ = mark.chunk;
    if (chunk_ < chunks_.size()) chunks_[chunk_].used = mark.used;
}

int64_t Arena::reserved_bytes() const {
    int64_t total = 0;
    for (const Chunk& chunk : chunks_) total += static_cast<int64_t>(chunk.size);
    return total;
}

std::map<std::string, int64_t> Arena::by_category() const {
    std::map<std::string, int64_t> result;
    for (const Entry& entry : log_) result[entry.category] += entry.bytes;
    return result;
}

std::map<std::string, int64_t> Arena::peak_by_category() const {
    return peak_by_category_.empty() ? by_category() : peak_by_category_;
}

void Arena::reset_peak() {
    peak_bytes_ = bytes_in_use_;
    peak_by_category_.clear();
}

int64_t Arena::take_interval_peak() { return std::exchange(interval_peak_, bytes_in_use_); }

}  // namespace fp8flow
