// SPDX-License-Identifier: MIT
// Arena: memory in chunks. Activations use it like a stack: the first step grows it chunk by chunk; once
// warm, a step allocates nothing. Two of them serve a model: `saved` (forward to backward) and `scratch`
// (inside one layer call).
#pragma once

#include "kernels/core/device.h"
#include "kernels/core/scaled_tensor.h"

#include <map>
#include <string>
#include <vector>

namespace fp8flow {

class Arena {
public:
    // stack: one allocation after the other; a tensor that does not fit into the rest of a chunk goes to the
    // next. first_fit: a tensor goes to the first chunk where it fits, so that no space is lost between
    // large tensors; what is allocated stays.
    enum class Order : uint8_t { stack, first_fit };
    // `poison`: fill each allocation with 0xFF (NaN in every float format, -1 in integers), for tests.
    Arena(Device& device, std::string name, bool poison = false, Order order = Order::stack);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // 256-byte aligned, uninitialised. `category` groups bytes in reports ("norm", "fc1", ...); a string
    // literal.
    TensorView tensor(DType dtype, std::initializer_list<int64_t> shape, const char* category);
    ScaledTensor fp8(DType dtype, std::initializer_list<int64_t> shape, ScaleLayout layout,
                     const char* category, int64_t groups = 0);

    struct Mark {
        std::size_t chunk = 0;
        std::size_t used = 0;
        std::size_t log = 0;
    };
    Mark mark() const;
    void rewind(const Mark& mark);
    // Replaces several chunks by one that is as large as the most that was in use. Together they are larger,
    // because a chunk is skipped if the next tensor does not fit into it. Waits for the device first. Does
    // nothing while memory is in use.
    void join();
    // Gives its memory back; the next use takes a chunk of at least `expected` bytes. Nothing may be in use,
    // neither on the host nor on the device.
    void release(int64_t expected = 0);

    int64_t bytes_in_use() const { return bytes_in_use_; }
    int64_t peak_bytes() const { return peak_bytes_; }
    int64_t reserved_bytes() const;
    // The most in use since its memory was last released; reset_peak() does not change it.
    int64_t deepest_bytes() const { return deepest_; }
    int64_t num_growths() const { return num_growths_; }  // must not rise once warm
    // Bytes by category at the moment of peak use since reset_peak().
    std::map<std::string, int64_t> peak_by_category() const;
    std::map<std::string, int64_t> by_category() const;
    void reset_peak();
    // The most in use since the last call.
    int64_t take_interval_peak();

private:
    struct Chunk {
        void* data;
        std::size_t size, used = 0;
    };
    struct Entry {
        const char* category;
        int64_t bytes;
    };
    void* allocate(std::size_t bytes, const char* category);
    void add_chunk(std::size_t bytes);
    void free_chunks();

    Device& device_;
    std::string name_;
    bool poison_;
    Order order_;
    std::vector<Chunk> chunks_;
    std::vector<Entry> log_;
    std::size_t chunk_ = 0;  // of the last allocation
    int64_t bytes_in_use_ = 0, peak_bytes_ = 0, interval_peak_ = 0, num_growths_ = 0;
    int64_t expected_ = 0;  // of the first chunk
    int64_t deepest_ = 0;
    std::map<std::string, int64_t> peak_by_category_;  // empty while the peak is what is in use
};

// Rewinds an arena at the end of a scope.
class ArenaScope {
public:
    explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
    ~ArenaScope() { arena_.rewind(mark_); }
    ArenaScope(const ArenaScope&) = delete;
    ArenaScope& operator=(const ArenaScope&) = delete;

private:
    Arena& arena_;
    Arena::Mark mark_;
};

}  // namespace fp8flow
