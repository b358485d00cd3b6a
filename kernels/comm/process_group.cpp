// SPDX-License-Identifier: MIT
// Collectives shared by all transports: each is one or two transfers, and reductions add in ascending rank
// order, so that the bits do not depend on the transport.
#include "kernels/comm/process_group.h"

#include "kernels/core/error.h"
#include "kernels/core/scalar_math.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fp8flow {

namespace {

// Up to this many bytes per rank every rank gathers all values and reduces alone: one round instead of two.
constexpr std::size_t kSmallReduceBytes = 4096;
// Larger spans are reduced in pieces of this size, which bounds the scratch.
constexpr std::size_t kReducePieceBytes = std::size_t{16} << 20;

using Part = ProcessGroup::Part;

std::vector<Part> equal_parts(int size, std::size_t stride, std::size_t bytes) {
    std::vector<Part> parts(static_cast<std::size_t>(size));
    for (std::size_t r = 0; r < parts.size(); ++r) parts[r] = {r * stride, bytes};
    return parts;
}

// result[i] = rows[0][i] (+) rows[1][i] (+) ..., from left to right; BF16 in FP32, rounded at the end. The
// first row may be the result.
template <class T, class Reduce>
void reduce_rows(const T* rows, std::size_t ranks, std::size_t count, T* result, Reduce reduce) {
    if constexpr (std::is_same_v<T, Bf16>) {
        for (std::size_t i = 0; i < count; ++i) {
            float sum = to_float(rows[i]);
            for (std::size_t r = 1; r < ranks; ++r) sum = reduce(sum, to_float(rows[r * count + i]));
            result[i] = to_bf16(sum);
        }
    } else {
        std::copy_n(rows, count, result);
        for (std::size_t r = 1; r < ranks; ++r)
            for (std::size_t i = 0; i < count; ++i) result[i] = reduce(result[i], rows[r * count + i]);
    }
}

// Copies the slices of `data` to a packed buffer, and back.
void pack(const std::byte* data, std::size_t element, const std::vector<Slice>& shard, std::byte* to) {
    for (const Slice& slice : shard) {
        const std::size_t bytes = static_cast<std::size_t>(slice.count) * element;
        std::memcpy(to, data + static_cast<std::size_t>(slice.first) * element, bytes);
        to += bytes;
    }
}
void unpack(const std::byte* from, std::size_t element, const std::vector<Slice>& shard, std::byte* data) {
    for (const Slice& slice : shard) {
        const std::size_t bytes = static_cast<std::size_t>(slice.count) * element;
        std::memcpy(data + static_cast<std::size_t>(slice.first) * element, from, bytes);
        from += bytes;
    }
}

// Consecutive parts, one per rank, each as long as the shard of its rank.
std::vector<Part> parts_of(const Shards& round, std::size_t element) {
    std::vector<Part> parts;
    for (const std::vector<Slice>& shard : round)
        parts.push_back({parts.empty() ? 0 : parts.back().offset + parts.back().bytes,
                         static_cast<std::size_t>(elements_of(shard)) * element});
    return parts;
}

// Rounds in which the shards of all ranks together fill a piece.
RoundLimits limits_of(std::size_t ranks, std::size_t element) {
    return {.elements = std::max<int64_t>(1, static_cast<int64_t>(kReducePieceBytes / (ranks * element))),
            .slices = std::numeric_limits<int64_t>::max()};
}

}  // namespace

std::vector<std::size_t> ProcessGroup::members_of(int color, std::span<const SplitKey> keys) {
    std::vector<std::size_t> members;
    for (std::size_t r = 0; r < keys.size(); ++r)
        if (keys[r].color == color) members.push_back(r);
    std::ranges::stable_sort(members,
                             [&](std::size_t a, std::size_t b) { return keys[a].key < keys[b].key; });
    return members;
}

void ProcessGroup::barrier() {
    std::vector<std::byte> sent(1), received(static_cast<std::size_t>(size()));
    transfer("barrier", sent.data(), equal_parts(size(), 0, 1), received.data(), equal_parts(size(), 1, 1));
}

void ProcessGroup::all_gather(const void* send, std::size_t bytes, void* recv) {
    transfer("all_gather", send, equal_parts(size(), 0, bytes), recv, equal_parts(size(), bytes, bytes));
}

void ProcessGroup::all_to_all(const void* send, std::span<const Part> send_parts, void* recv,
                              std::span<const Part> recv_parts) {
    const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
    FP8FLOW_CHECK(send_parts.size() == ranks && recv_parts.size() == ranks, "{} and {} parts for {} ranks",
                  send_parts.size(), recv_parts.size(), ranks);
    FP8FLOW_CHECK(send_parts[self].bytes == recv_parts[self].bytes,
                  "rank {} sends itself {} bytes, expects {}", rank(), send_parts[self].bytes,
                  recv_parts[self].bytes);
    transfer("all_to_all", send, send_parts, recv, recv_parts);
}

void ProcessGroup::broadcast(void* data, std::size_t bytes, int root) {
    FP8FLOW_CHECK(root >= 0 && root < size(), "root {} of {} ranks", root, size());
    std::vector<Part> send_parts = equal_parts(size(), 0, rank() == root ? bytes : 0);
    std::vector<Part> recv_parts = equal_parts(size(), 0, 0);
    recv_parts[static_cast<std::size_t>(root)].bytes = bytes;
    transfer("broadcast", data, send_parts, data, recv_parts);
}

void ProcessGroup::broadcast(std::string& text, int root) {
    auto length = static_cast<int64_t>(text.size());
    broadcast(&length, sizeof length, root);
    text.resize(static_cast<std::size_t>(length));
    broadcast(text.data(), text.size(), root);
}

template <class T, class Reduce>
void ProcessGroup::all_reduce(const char* operation, std::span<T> values, Reduce reduce) {
    const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
    const auto rows_for = [&](std::size_t count) {
        return reinterpret_cast<T*>(scratch(ranks * count * sizeof(T)));
    };
    if (values.size_bytes() <= kSmallReduceBytes) {
        T* rows = rows_for(values.size());
        transfer(operation, values.data(), equal_parts(size(), 0, values.size_bytes()), rows,
                 equal_parts(size(), values.size_bytes(), values.size_bytes()));
        reduce_rows(rows, ranks, values.size(), values.data(), reduce);
        return;
    }
    std::vector<Part> shards(ranks);
    for (std::size_t first = 0; first < values.size(); first += kReducePieceBytes / sizeof(T)) {
        const std::span<T> piece =
            values.subspan(first, std::min(kReducePieceBytes / sizeof(T), values.size() - first));
        const std::size_t shard = (piece.size() + ranks - 1) / ranks;
        for (std::size_t r = 0; r < ranks; ++r) {
            const std::size_t begin = std::min(r * shard, piece.size()),
                              end = std::min(begin + shard, piece.size());
            shards[r] = {begin * sizeof(T), (end - begin) * sizeof(T)};
        }
        const std::size_t count = shards[self].bytes / sizeof(T);
        T* rows = rows_for(count);
        transfer(operation, piece.data(), shards, rows,
                 equal_parts(size(), shards[self].bytes, shards[self].bytes));
        reduce_rows(rows, ranks, count, rows, reduce);
        transfer(operation, rows, equal_parts(size(), 0, shards[self].bytes), piece.data(), shards);
    }
}

std::byte* ProcessGroup::scratch(std::size_t bytes) {
    scratch_.resize(std::max(scratch_.size(), bytes));
    return scratch_.data();
}

template <class T> void ProcessGroup::reduce_scatter_sum(std::span<T> values, const Shards& shards) {
    const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
    auto* const data = reinterpret_cast<std::byte*>(values.data());
    for (const Shards& round : rounds_of(shards, limits_of(ranks, sizeof(T)))) {
        const std::vector<Part> parts = parts_of(round, sizeof(T));
        const std::size_t own = parts[self].bytes / sizeof(T);
        const std::size_t bytes = parts.back().offset + parts.back().bytes;
        T* const rows = reinterpret_cast<T*>(scratch(bytes + ranks * own * sizeof(T)));
        std::byte* const sent = scratch_.data() + ranks * own * sizeof(T);
        for (std::size_t r = 0; r < ranks; ++r) pack(data, sizeof(T), round[r], sent + parts[r].offset);
        transfer("reduce_scatter_sum", sent, parts, rows,
                 equal_parts(size(), own * sizeof(T), own * sizeof(T)));
        reduce_rows(rows, ranks, own, rows, [](auto a, auto b) { return a + b; });
        unpack(scratch_.data(), sizeof(T), round[self], data);
    }
}

void ProcessGroup::all_gather_shards(void* data, std::size_t element_bytes, const Shards& shards) {
    const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
    auto* const values = static_cast<std::byte*>(data);
    for (const Shards& round : rounds_of(shards, limits_of(ranks, element_bytes))) {
        const std::vector<Part> parts = parts_of(round, element_bytes);
        const std::size_t bytes = parts.back().offset + parts.back().bytes;
        std::byte* const received = scratch(bytes + parts[self].bytes);
        pack(values, element_bytes, round[self], received + bytes);
        transfer("all_gather", received + bytes, equal_parts(size(), 0, parts[self].bytes), received, parts);
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != self) unpack(received + parts[r].offset, element_bytes, round[r], values);
    }
}

template void ProcessGroup::reduce_scatter_sum(std::span<float>, const Shards&);
template void ProcessGroup::reduce_scatter_sum(std::span<Bf16>, const Shards&);
template void ProcessGroup::reduce_scatter_sum(std::span<int64_t>, const Shards&);

void ProcessGroup::all_reduce_sum(std::span<float> values) {
    all_reduce("all_reduce_sum", values, [](float a, float b) { return a + b; });
}
void ProcessGroup::all_reduce_sum(std::span<Bf16> values) {
    all_reduce("all_reduce_sum", values, [](float a, float b) { return a + b; });
}
void ProcessGroup::all_reduce_sum(std::span<double> values) {
    all_reduce("all_reduce_sum", values, [](double a, double b) { return a + b; });
}
void ProcessGroup::all_reduce_sum(std::span<int64_t> values) {
    all_reduce("all_reduce_sum", values, [](int64_t a, int64_t b) { return a + b; });
}
void ProcessGroup::all_reduce_max(std::span<float> values) {
    all_reduce("all_reduce_max", values, [](float a, float b) { return max_ignore_nan(a, b); });
}
void ProcessGroup::all_reduce_max(std::span<int64_t> values) {
    all_reduce("all_reduce_max", values, [](int64_t a, int64_t b) { return std::max(a, b); });
}
bool ProcessGroup::all_true(bool here) {
    int64_t without = here ? 0 : 1;
    all_reduce_max(std::span<int64_t>(&without, 1));
    return without == 0;
}

}  // namespace fp8flow
