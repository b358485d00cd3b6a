// SPDX-License-Identifier: MIT
// What every collective of a ProcessGroup must give, from closed forms, and reduce_scatter and all_gather of
// an exchange; the same checks run over MPI processes, over threads and on GPUs. Called by all ranks of the
// group.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/core/random.h"
#include "tests/support/exchange_oracle.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace fp8flow::test {

// A byte that names its sender, receiver and place.
inline uint8_t stamp(int from, int to, std::size_t i) {
    return static_cast<uint8_t>(31 * from + 7 * to + static_cast<int>(i % 251));
}

inline void check_gather_and_broadcast(ProcessGroup& group, std::size_t bytes) {
    const auto size = static_cast<std::size_t>(group.size());
    std::vector<uint8_t> send(bytes), recv(size * bytes, 0xFF);
    for (std::size_t i = 0; i < bytes; ++i) send[i] = stamp(group.rank(), 0, i);
    group.all_gather(send.data(), bytes, recv.data());
    std::vector<uint8_t> in_place(size * bytes, 0xFF);
    if (bytes > 0) std::memcpy(&in_place[static_cast<std::size_t>(group.rank()) * bytes], send.data(), bytes);
    group.all_gather(in_place.data() + static_cast<std::size_t>(group.rank()) * bytes, bytes,
                     in_place.data());
    std::size_t wrong = 0;
    for (std::size_t r = 0; r < size; ++r)
        for (std::size_t i = 0; i < bytes; ++i)
            wrong += recv[r * bytes + i] != stamp(static_cast<int>(r), 0, i);
    EXPECT_EQ(wrong, 0u) << "rank " << group.rank() << " of " << size << ", " << bytes << " bytes";
    EXPECT_EQ(in_place, recv);

    for (int root = 0; root < group.size(); ++root) {
        std::vector<uint8_t> data(bytes, 0xFF);
        if (group.rank() == root)
            for (std::size_t i = 0; i < bytes; ++i) data[i] = stamp(root, 1, i);
        group.broadcast(data.data(), bytes, root);
        wrong = 0;
        for (std::size_t i = 0; i < bytes; ++i) wrong += data[i] != stamp(root, 1, i);
        EXPECT_EQ(wrong, 0u) << "rank " << group.rank() << ", root " << root;
    }
}

// Rank a sends (a * 3 + b * 5 + shift) % 7 * unit bytes to rank b: all sizes differ and some are zero; gaps
// must stay untouched.
inline void check_all_to_all(ProcessGroup& group, std::size_t unit, int shift) {
    constexpr std::size_t kGap = 3;
    const int size = group.size(), rank = group.rank();
    const auto bytes = [&](int from, int to) {
        return static_cast<std::size_t>((from * 3 + to * 5 + shift) % 7) * unit;
    };
    std::vector<ProcessGroup::Part> send_parts, recv_parts;
    std::vector<uint8_t> send, recv, want;
    for (int peer = 0; peer < size; ++peer) {
        send_parts.push_back({send.size(), bytes(rank, peer)});
        for (std::size_t i = 0; i < bytes(rank, peer); ++i) send.push_back(stamp(rank, peer, i));
        recv_parts.push_back({want.size(), bytes(peer, rank)});
        for (std::size_t i = 0; i < bytes(peer, rank); ++i) want.push_back(stamp(peer, rank, i));
        want.resize(want.size() + kGap, 0xFF);
    }
    recv.assign(want.size(), 0xFF);
    group.all_to_all(send.data(), send_parts, recv.data(), recv_parts);
    EXPECT_TRUE(recv == want) << "rank " << rank << " of " << size << ", unit " << unit;
}

// Values of very different size, so that any other order of the fp32 additions gives other bits.
inline float term(int rank, std::size_t i) {
    const auto index = static_cast<uint64_t>(i);
    return random_normal(7, static_cast<uint64_t>(rank), index) *
           std::ldexp(1.0f, static_cast<int>((index + static_cast<uint64_t>(rank) * 5) % 20));
}

inline void check_all_reduce(ProcessGroup& group, std::size_t count) {
    std::vector<float> sum(count), maximum(count);
    std::vector<Bf16> narrow(count);
    std::vector<double> sum64(count);
    std::vector<int64_t> integers(count), integer_max(count);
    for (std::size_t i = 0; i < count; ++i) {
        sum[i] = maximum[i] = term(group.rank(), i);
        narrow[i] = to_bf16(sum[i]);
        sum64[i] = static_cast<double>(sum[i]) / 3;
        integers[i] = integer_max[i] = static_cast<int64_t>(i) * (group.rank() + 1) - (int64_t{1} << 40);
    }
    group.all_reduce_sum(std::span<float>(sum));
    group.all_reduce_max(std::span<float>(maximum));
    group.all_reduce_sum(std::span<Bf16>(narrow));
    group.all_reduce_sum(std::span<double>(sum64));
    group.all_reduce_sum(std::span<int64_t>(integers));
    group.all_reduce_max(std::span<int64_t>(integer_max));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
        float want = term(0, i), want_max = want, want_narrow = round_bf16(want);
        double want64 = static_cast<double>(want) / 3;
        for (int r = 1; r < group.size(); ++r) {
            want += term(r, i);
            want_narrow += round_bf16(term(r, i));
            want_max = std::fmax(want_max, term(r, i));
            want64 += static_cast<double>(term(r, i)) / 3;
        }
        const int64_t ranks = group.size(), at = static_cast<int64_t>(i);
        wrong += std::bit_cast<uint32_t>(sum[i]) != std::bit_cast<uint32_t>(want) || maximum[i] != want_max ||
                 narrow[i].bits != to_bf16(want_narrow).bits || sum64[i] != want64 ||
                 integers[i] != at * ranks * (ranks + 1) / 2 - ranks * (int64_t{1} << 40) ||
                 integer_max[i] != at * ranks - (int64_t{1} << 40);
    }
    EXPECT_EQ(wrong, 0u) << "rank " << group.rank() << " of " << group.size() << ", " << count << " values";
}

inline void check_reduce_max_of_nan(ProcessGroup& group) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> values{nan, group.rank() == group.size() - 1 ? 2.0f : nan,
                              static_cast<float>(-group.rank()), group.rank() == 0 ? 3.0f : nan};
    group.all_reduce_max(std::span<float>(values));
    EXPECT_TRUE(std::isnan(values[0]));
    EXPECT_EQ(values[1], 2.0f);
    EXPECT_EQ(values[2], 0.0f);
    EXPECT_EQ(values[3], 3.0f);
}

// Pairs of neighbours, then the even and the odd ranks, then groups inside a group; all alive at once.
inline void check_split(ProcessGroup& group) {
    const int rank = group.rank(), size = group.size();
    const auto pairs = group.split(rank / 2);
    const auto parity = group.split(100 - rank % 2);
    EXPECT_EQ(pairs->rank(), rank % 2);
    EXPECT_EQ(pairs->size(), std::min(2, size - rank / 2 * 2));
    EXPECT_EQ(parity->rank(), rank / 2);
    EXPECT_EQ(parity->size(), (size - rank % 2 + 1) / 2);

    const auto sum_of = [](ProcessGroup& members, int64_t value) {
        members.all_reduce_sum(std::span<int64_t>(&value, 1));
        return value;
    };
    int64_t pair_sum = 0, parity_sum = 0;
    for (int r = 0; r < size; ++r) {
        if (r / 2 == rank / 2) pair_sum += int64_t{1} << r;
        if (r % 2 == rank % 2) parity_sum += int64_t{1} << r;
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_EQ(sum_of(*pairs, int64_t{1} << rank), pair_sum);
        EXPECT_EQ(sum_of(*parity, int64_t{1} << rank), parity_sum);
        EXPECT_EQ(sum_of(group, int64_t{1} << rank), (int64_t{1} << size) - 1);
    }
    const auto alone = pairs->split(pairs->rank());
    EXPECT_EQ(group.split(0, -rank)->rank(), size - 1 - rank) << "in the given order";
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(sum_of(*alone, rank), rank);
    check_all_reduce(*parity, 3000);

    group.set_activity("step 3");
    EXPECT_EQ(alone->activity(), "step 3") << "groups made by split share the activity";
}

inline void check_collectives(ProcessGroup& group) {
    group.barrier();
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{3} << 20})
        check_gather_and_broadcast(group, bytes);
    for (int shift = 0; shift < 7; ++shift)
        check_all_to_all(group, 1 + 97 * static_cast<std::size_t>(shift), shift);
    check_all_to_all(group, std::size_t{1} << 20, 2);
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{1024},
                                    std::size_t{1025}, std::size_t{4099}})
        check_all_reduce(group, count);
    check_reduce_max_of_nan(group);
    check_split(group);
}

// ---- reduce_scatter and all_gather of any exchange, over any way to divide a tensor: sums have the bits of
// all_reduce, gathered bytes are the owner's, and what is in no shard, or another's, stays. One table for
// threads, MPI and GPUs.

struct SharesCase {
    std::string name;
    int64_t numel = 0;
    Shards shards;
};

// Slices of `unit` elements, alternating over the ranks, `gap` elements between them, as many as fit.
inline Shards interleaved(int64_t numel, int64_t ranks, int64_t unit, int64_t gap) {
    Shards shards(static_cast<std::size_t>(ranks));
    int64_t rank = 0;
    for (int64_t first = gap; first < numel; first += unit + gap, rank = (rank + 1) % ranks)
        shards[static_cast<std::size_t>(rank)].push_back({first, std::min(unit, numel - first)});
    return shards;
}

inline std::vector<SharesCase> shares_cases(int64_t ranks, int64_t large) {
    std::vector<SharesCase> cases;
    const auto add = [&](std::string name, int64_t numel, Shards shards) {
        cases.push_back({std::move(name), numel, std::move(shards)});
    };
    Shards nothing(static_cast<std::size_t>(ranks)), last = nothing, empty = nothing;
    last.back() = {{0, 1000}};
    for (auto& shard : empty) shard = {{7, 0}, {8, 0}};
    add("nothing", 5, nothing);
    add("empty slices", 9, empty);
    add("all of the last rank", 1000, last);
    add("one element", 1, interleaved(1, ranks, 1, 0));
    add("odd slices with gaps", 1001, interleaved(1001, ranks, 13, 5));
    add("many slices", 4096, interleaved(4096, ranks, 3, 1));
    add("equal parts", 64 * ranks * 5, interleaved(64 * ranks * 5, ranks, 64 * 5, 0));
    // several rounds of every exchange, the last rank's share the shortest
    add("large", large, interleaved(large, ranks, ceil_div(large, ranks), 0));
    add("large, interleaved", large, interleaved(large, ranks, 8192, 64));
    return cases;
}

// Of values of different size: a sum in another order rounds differently.
inline void fill_summand(const TensorView& values, int rank) {
    for (int64_t i = 0; i < values.numel(); ++i) {
        const float x = value(31, rank, 0, i);
        if (values.dtype == DType::f32) values.as<float>()[i] = x;
        if (values.dtype == DType::bf16) values.as<Bf16>()[i] = to_bf16(x);
        if (values.dtype == DType::i64) values.as<int64_t>()[i] = (int64_t{1} << 40) * (rank + 1) - i;
    }
}

inline void check_reduce_scatter(Exchange& exchange, Ranks ranks, DType dtype, const SharesCase& c) {
    const int rank = exchange.rank_among(ranks);
    HostTensor values(dtype, {c.numel}), sums(dtype, {c.numel});
    fill_summand(values, rank);
    std::memcpy(sums.view().data, values.view().data, static_cast<std::size_t>(sums.view().bytes()));
    exchange.all_reduce(Reduce::sum, ranks, sums);
    HostTensor want(dtype, {c.numel});
    fill_summand(want, rank);
    const int64_t element = size_of(dtype);
    for (const Slice& slice : c.shards[static_cast<std::size_t>(rank)])
        std::memcpy(want.view().bytes_ptr() + slice.first * element,
                    sums.view().bytes_ptr() + slice.first * element,
                    static_cast<std::size_t>(slice.count * element));
    exchange.reduce_scatter(ranks, values, c.shards);
    EXPECT_TRUE(same_bytes(values, want)) << c.name << ", " << name_of(dtype) << ", rank " << rank;
}

inline void check_all_gather(Exchange& exchange, Ranks ranks, DType dtype, const SharesCase& c) {
    const int rank = exchange.rank_among(ranks);
    const int64_t element = size_of(dtype);
    HostTensor values(dtype, {c.numel}), want(dtype, {c.numel});
    const auto byte_of = [](std::size_t owner, int64_t byte) {
        return static_cast<uint8_t>(mix(owner + 1, static_cast<uint64_t>(byte)));
    };
    for (const HostTensor* tensor : {&values, &want})
        for (int64_t i = 0; i < c.numel * element; ++i)
            tensor->view().bytes_ptr()[i] = byte_of(100 + static_cast<std::size_t>(rank), i);
    for (std::size_t r = 0; r < c.shards.size(); ++r)
        for (const Slice& slice : c.shards[r])
            for (int64_t i = slice.first * element; i < (slice.first + slice.count) * element; ++i) {
                want.view().bytes_ptr()[i] = byte_of(r, i);
                if (r == static_cast<std::size_t>(rank)) values.view().bytes_ptr()[i] = byte_of(r, i);
            }
    exchange.all_gather(ranks, values, c.shards);
    EXPECT_TRUE(same_bytes(values, want)) << c.name << ", " << name_of(dtype) << ", rank " << rank;
}

// large: elements of the cases of several rounds.
inline void check_shards(Exchange& exchange, Ranks ranks, int64_t large) {
    for (const SharesCase& c : shares_cases(exchange.num_ranks(ranks), large)) {
        for (const DType dtype : {DType::f32, DType::bf16, DType::i64})
            check_reduce_scatter(exchange, ranks, dtype, c);
        for (const DType dtype : {DType::e4m3, DType::bf16, DType::f32})
            check_all_gather(exchange, ranks, dtype, c);
    }
}

}  // namespace fp8flow::test
