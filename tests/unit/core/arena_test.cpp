// SPDX-License-Identifier: MIT
// The arena (placement, growth, marks, peaks), tensor views, and the counter-based random numbers.
#include "kernels/core/arena.h"
#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "kernels/reference/host_device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace fp8flow {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Host memory that counts what is handed out, and refuses above a limit.
class CountingDevice final : public HostDevice {
public:
    void* allocate(std::size_t bytes) override {
        require(static_cast<int64_t>(bytes) <= limit, ExitCode::memory, "{} bytes", bytes);
        void* data = HostDevice::allocate(bytes);
        live.insert(data);
        ++num_allocations;
        return data;
    }
    void free(void* data) override {
        EXPECT_EQ(live.erase(data), 1u);
        HostDevice::free(data);
    }

    std::set<void*> live;
    int64_t num_allocations = 0;
    int64_t limit = int64_t{1} << 40;
};

TensorView bytes_of_arena(Arena& arena, int64_t bytes, const char* category = "x") {
    return arena.tensor(DType::e4m3, {bytes}, category);
}

TEST(Arena, TensorsAreAlignedAndDisjoint) {
    HostDevice device;
    Arena arena(device, "test");
    std::vector<TensorView> views;
    for (int64_t size : {1, 255, 256, 257, 0, 1000, 3}) views.push_back(bytes_of_arena(arena, size));
    std::set<void*> starts;
    for (std::size_t i = 0; i < views.size(); ++i) {
        EXPECT_EQ(reinterpret_cast<uintptr_t>(views[i].data) % 256, 0u);
        starts.insert(views[i].data);
        std::memset(views[i].data, static_cast<int>(i + 1), static_cast<std::size_t>(views[i].bytes()));
    }
    EXPECT_EQ(starts.size(), views.size());  // even the empty one has its own place
    for (std::size_t i = 0; i < views.size(); ++i)
        for (int64_t b = 0; b < views[i].bytes(); ++b) ASSERT_EQ(views[i].bytes_ptr()[b], i + 1);
    EXPECT_EQ(arena.bytes_in_use(), 256 * (1 + 1 + 1 + 2 + 1 + 4 + 1));
}

TEST(Arena, FirstFitLosesNoRestBetweenLargeTensors) {
    CountingDevice device;
    Arena stack(device, "stack"), first_fit(device, "parameters", false, Arena::Order::first_fit);
    for (int layer = 0; layer < 8; ++layer)  // a matrix in FP8 and its scales, as parameters have them
        for (Arena* arena : {&stack, &first_fit}) {
            bytes_of_arena(*arena, 65 * kMiB);
            std::memset(bytes_of_arena(*arena, kMiB).data, layer, kMiB);
        }
    EXPECT_EQ(first_fit.bytes_in_use(), 8 * 66 * kMiB);
    EXPECT_EQ(first_fit.reserved_bytes(), (8 * 65 + 64) * kMiB);
    EXPECT_EQ(stack.reserved_bytes(), 8 * (65 + 64) * kMiB);
    std::set<void*> places;
    for (int i = 0; i < 1000; ++i) places.insert(bytes_of_arena(first_fit, 257).data);
    EXPECT_EQ(places.size(), 1000u);
    EXPECT_EQ(first_fit.reserved_bytes(), (8 * 65 + 64) * kMiB);
    EXPECT_THROW(first_fit.rewind({}), Error);
}

TEST(Arena, GrowsByChunksAndFreesThem) {
    CountingDevice device;
    {
        Arena arena(device, "test");
        EXPECT_EQ(device.num_allocations, 0);  // nothing before it is needed
        bytes_of_arena(arena, 40 * kMiB);
        bytes_of_arena(arena, 20 * kMiB);
        EXPECT_EQ(arena.num_growths(), 1);
        bytes_of_arena(arena, 20 * kMiB);  // does not fit after 60 MiB of 64
        EXPECT_EQ(arena.num_growths(), 2);
        const TensorView large = bytes_of_arena(arena, 100 * kMiB);  // larger than a chunk
        EXPECT_EQ(arena.num_growths(), 3);
        EXPECT_EQ(arena.reserved_bytes(), (64 + 64 + 100) * kMiB);
        EXPECT_EQ(arena.bytes_in_use(), 180 * kMiB);
        large.bytes_ptr()[large.bytes() - 1] = 1;
        EXPECT_EQ(device.live.size(), 3u);
    }
    EXPECT_TRUE(device.live.empty());
}

// One step's pattern of marks and sizes, across chunks and with a tensor larger than a chunk.
std::vector<void*> step(Arena& arena) {
    std::vector<void*> places;
    const ArenaScope all(arena);
    places.push_back(bytes_of_arena(arena, 40 * kMiB).data);
    {
        const ArenaScope inner(arena);
        places.push_back(bytes_of_arena(arena, 30 * kMiB).data);
        places.push_back(bytes_of_arena(arena, 90 * kMiB).data);
    }
    places.push_back(bytes_of_arena(arena, 10 * kMiB).data);
    {
        const ArenaScope inner(arena);
        places.push_back(bytes_of_arena(arena, 64 * kMiB).data);
        places.push_back(bytes_of_arena(arena, 1).data);
    }
    places.push_back(bytes_of_arena(arena, 20 * kMiB).data);
    return places;
}

TEST(Arena, AWarmStepAllocatesNothingAndRepeats) {
    CountingDevice device;
    Arena arena(device, "test");
    const std::vector<void*> first = step(arena);
    const int64_t allocations = device.num_allocations, growths = arena.num_growths();
    EXPECT_EQ(arena.bytes_in_use(), 0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(step(arena), first);
    EXPECT_EQ(device.num_allocations, allocations);
    EXPECT_EQ(arena.num_growths(), growths);
}

TEST(Arena, JoinMakesOneChunkOfThePeak) {
    CountingDevice device;
    Arena arena(device, "test");
    const Arena::Mark empty = arena.mark();
    arena.join();  // nothing to join
    step(arena);
    EXPECT_EQ(device.live.size(), 3u);  // of 64, 64 and 90 MiB
    EXPECT_EQ(arena.peak_bytes(), 160 * kMiB);
    const int64_t growths = arena.num_growths();
    arena.join();
    EXPECT_EQ(arena.num_growths(), growths + 1);
    for (int i = 0; i < 2; ++i) {
        step(arena);
        arena.join();
        EXPECT_EQ(device.live.size(), 1u);
        EXPECT_EQ(arena.reserved_bytes(), 160 * kMiB);
        EXPECT_EQ(arena.num_growths(), growths + 1);
    }
    // a later step that needs more
    const TensorView live = bytes_of_arena(arena, 100 * kMiB);
    bytes_of_arena(arena, 70 * kMiB);
    arena.join();  // not while memory is in use
    EXPECT_EQ(device.live.size(), 2u);
    live.bytes_ptr()[live.bytes() - 1] = 1;
    arena.rewind(empty);
    arena.reset_peak();  // of the reports
    arena.join();
    EXPECT_EQ(device.live.size(), 1u);
    EXPECT_EQ(arena.reserved_bytes(), 170 * kMiB);
}

TEST(Arena, RewindAcrossChunksReusesTheSamePlace) {
    HostDevice device;
    Arena arena(device, "test");
    const TensorView kept = bytes_of_arena(arena, 60 * kMiB, "kept");
    const Arena::Mark mark = arena.mark();
    const TensorView small = bytes_of_arena(arena, kMiB, "a");
    bytes_of_arena(arena, 50 * kMiB, "b");  // second chunk
    bytes_of_arena(arena, 50 * kMiB, "b");  // third chunk
    arena.rewind(mark);
    EXPECT_EQ(arena.bytes_in_use(), 60 * kMiB);
    EXPECT_EQ(arena.by_category(), (std::map<std::string, int64_t>{{"kept", 60 * kMiB}}));
    EXPECT_EQ(bytes_of_arena(arena, kMiB).data, small.data);  // after `kept`, in the first chunk
    EXPECT_LE(kept.bytes_ptr() + kept.bytes(), small.bytes_ptr());
    arena.rewind(mark);
    arena.rewind(mark);  // twice is harmless
    EXPECT_EQ(arena.bytes_in_use(), 60 * kMiB);
    EXPECT_EQ(arena.num_growths(), 3);
}

TEST(Arena, ReleaseGivesEverythingBackWhenNothingIsInUse) {
    CountingDevice device;
    Arena arena(device, "test");
    const Arena::Mark empty = arena.mark();
    bytes_of_arena(arena, 100 * kMiB);
    bytes_of_arena(arena, 1);
    EXPECT_THROW(arena.release(), Error);
    arena.rewind(empty);
    arena.release();
    EXPECT_TRUE(device.live.empty());
    EXPECT_EQ(arena.reserved_bytes(), 0);
    EXPECT_EQ(arena.num_growths(), 2);  // of its life
    bytes_of_arena(arena, 1);
    EXPECT_EQ(arena.num_growths(), 3);
}

TEST(Arena, ReleaseStatesTheNextChunk) {
    CountingDevice device;
    Arena arena(device, "test");
    const Arena::Mark empty = arena.mark();
    bytes_of_arena(arena, 100 * kMiB);
    arena.rewind(empty);
    arena.release(150 * kMiB);
    EXPECT_EQ(arena.reserved_bytes(), 0);  // taken when it is needed
    bytes_of_arena(arena, kMiB);
    bytes_of_arena(arena, 149 * kMiB);
    EXPECT_EQ(arena.reserved_bytes(), 150 * kMiB);
    bytes_of_arena(arena, 1);  // the chunk after it is as ever
    EXPECT_EQ(arena.reserved_bytes(), (150 + 64) * kMiB);
}

TEST(Arena, RewindForwardIsRefused) {
    HostDevice device;
    Arena arena(device, "scratch");
    const Arena::Mark empty = arena.mark();
    bytes_of_arena(arena, 1);
    const Arena::Mark later = arena.mark();
    arena.rewind(empty);
    EXPECT_THROW(arena.rewind(later), Error);
}

TEST(Arena, PeakByCategoryIsThatOfThePeak) {
    using Bytes = std::map<std::string, int64_t>;
    HostDevice device;
    Arena arena(device, "test");
    EXPECT_EQ(arena.peak_by_category(), Bytes{});
    bytes_of_arena(arena, 512, "norm");
    EXPECT_EQ(arena.peak_by_category(), (Bytes{{"norm", 512}}));  // before any rewind, too
    const Arena::Mark mark = arena.mark();
    bytes_of_arena(arena, 1024, "fc1");
    bytes_of_arena(arena, 256, "norm");
    arena.rewind(mark);
    EXPECT_EQ(arena.peak_bytes(), 1792);
    bytes_of_arena(arena, 768, "fc2");  // below the peak: changes nothing
    EXPECT_EQ(arena.peak_bytes(), 1792);
    EXPECT_EQ(arena.peak_by_category(), (Bytes{{"fc1", 1024}, {"norm", 768}}));
    bytes_of_arena(arena, 2048, "fc2");  // a new peak
    arena.rewind(mark);
    EXPECT_EQ(arena.peak_bytes(), 512 + 768 + 2048);
    EXPECT_EQ(arena.peak_by_category(), (Bytes{{"fc2", 2816}, {"norm", 512}}));

    arena.reset_peak();
    EXPECT_EQ(arena.peak_bytes(), 512);
    EXPECT_EQ(arena.peak_by_category(), (Bytes{{"norm", 512}}));
    bytes_of_arena(arena, 256, "swiglu");
    EXPECT_EQ(arena.peak_by_category(), (Bytes{{"norm", 512}, {"swiglu", 256}}));
}

TEST(Arena, AFailedGrowthLeavesItUsable) {
    CountingDevice device;
    Arena arena(device, "test");
    const TensorView first = bytes_of_arena(arena, 32 * kMiB);
    const Arena::Mark mark = arena.mark();
    device.limit = 64 * kMiB;
    EXPECT_THROW(bytes_of_arena(arena, 200 * kMiB), Error);
    EXPECT_EQ(arena.bytes_in_use(), 32 * kMiB);
    arena.rewind(mark);
    const TensorView second = bytes_of_arena(arena, 16 * kMiB);
    EXPECT_EQ(second.bytes_ptr(), first.bytes_ptr() + 32 * kMiB);
    EXPECT_EQ(arena.num_growths(), 1);
}

TEST(Arena, PoisonFillsEveryAllocation) {
    HostDevice device;
    Arena arena(device, "test", true);
    for (int round = 0; round < 2; ++round) {
        const ArenaScope scope(arena);
        const TensorView view = arena.tensor(DType::f32, {3, 5}, "x");
        for (int64_t i = 0; i < 15; ++i) {
            EXPECT_TRUE(std::isnan(view.as<float>()[i]));
            view.as<float>()[i] = 1.0f;
        }
    }
}

TEST(Arena, Fp8TensorsComeWithScalesOfTheirLayout) {
    HostDevice device;
    Arena arena(device, "test");
    const ScaledTensor wire = arena.fp8(DType::e4m3, {6, 256}, ScaleLayout::vec128_wire, "dispatch");
    EXPECT_EQ(describe(wire.data), "e4m3[6, 256]");
    EXPECT_EQ(describe(wire.scales), "e8m0[6, 2]");
    const ScaledTensor weight = arena.fp8(DType::e4m3, {3, 256, 384}, ScaleLayout::block128, "weights");
    EXPECT_EQ(describe(weight.scales), "f32[3, 2, 4]");
    const ScaledTensor rows = arena.fp8(DType::e5m2, {7, 256}, ScaleLayout::row, "rows");
    EXPECT_EQ(describe(rows.scales), "f32[7]");
    const ScaledTensor columns = arena.fp8(DType::e4m3, {256, 64}, ScaleLayout::group_row, "columns", 5);
    EXPECT_EQ(describe(columns.scales), "f32[5, 256]");
    check_fp8(columns, "columns", 5);
    const ScaledTensor plain = arena.fp8(DType::bf16, {4, 4}, ScaleLayout::none, "plain");
    EXPECT_FALSE(plain.scales);
}

// ---- views

TEST(TensorView, SlicesAndReshapesPointIntoTheSameMemory) {
    std::vector<float> data(24);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
    const TensorView view = make_view(data.data(), DType::f32, {2, 3, 4});
    EXPECT_EQ(view.numel(), 24);
    EXPECT_EQ(view.bytes(), 96);
    EXPECT_EQ(view.rows(), 6);
    EXPECT_EQ(view.cols(), 4);
    EXPECT_EQ(view.dim(-1), 4);
    EXPECT_EQ(view[1].as<float>()[0], 12.0f);
    EXPECT_EQ(describe(view[1]), "f32[3, 4]");
    EXPECT_EQ(view[1][2].as<float>()[3], 23.0f);
    const TensorView rows = view.reshape({6, 4}).slice(2, 3);
    EXPECT_EQ(describe(rows), "f32[3, 4]");
    EXPECT_EQ(rows.as<float>()[0], 8.0f);
    EXPECT_EQ(view.slice(2, 0).numel(), 0);
}

TEST(TensorView, MisuseIsRefused) {
    float data[6] = {};
    const TensorView view = make_view(data, DType::f32, {2, 3});
    EXPECT_THROW(view.reshape({4}), Error);
    EXPECT_THROW(view.slice(1, 2), Error);
    EXPECT_THROW(view.slice(-1, 1), Error);
    EXPECT_THROW(view.as<int32_t>(), Error);
    EXPECT_THROW(view[2], Error);
    EXPECT_THROW(view[0][0], Error);  // scalars have no rank
    EXPECT_THROW(make_view(data, DType::f32, {-1, 3}), Error);
    TensorView shared = view;
    const int64_t base = 1;
    shared.row_base = &base;
    EXPECT_THROW(shared.slice(0, 1), Error);
}

TEST(TensorView, AbsentAndEmptyDiffer) {
    const TensorView absent;
    EXPECT_FALSE(absent);
    EXPECT_EQ(absent.numel(), 0);
    EXPECT_EQ(describe(absent), "absent");
    const TensorView empty = make_view(nullptr, DType::bf16, {0, 128});
    EXPECT_TRUE(static_cast<bool>(empty));
    EXPECT_EQ(empty.rows(), 0);
    EXPECT_EQ(describe(empty), "bf16[0, 128]");
}

// ---- random numbers

// Known answers published with the generator (Random123, philox4x32-10).
TEST(Random, PhiloxKnownAnswers) {
    using Words = std::array<uint32_t, 4>;
    EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u}));
    EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              (Words{0x408F276Du, 0x41C83B0Eu, 0xA20BC7C6u, 0x6D5451FDu}));
    EXPECT_EQ(philox4x32({0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u}, {0xA4093822u, 0x299F31D0u}),
              (Words{0xD16CFE09u, 0x94FDCCEBu, 0x5001E420u, 0x24126EA1u}));
}

TEST(Random, Fnv1aKnownAnswers) {
    EXPECT_EQ(fnv1a64(""), 0xCBF29CE484222325ull);
    EXPECT_EQ(fnv1a64("a"), 0xAF63DC4C8601EC8Cull);
    EXPECT_EQ(fnv1a64("foobar"), 0x85944171F73967E8ull);
    EXPECT_EQ(fnv1a64("\xff"), (0xCBF29CE484222325ull ^ 0xFFull) * 0x100000001B3ull);  // bytes are unsigned
}

// All 64 bits of seed, stream and index reach the result.
TEST(Random, EveryBitOfTheCounterMatters) {
    const auto words = random_words(1, 2, 3);
    for (int bit = 0; bit < 64; ++bit) {
        const uint64_t flip = uint64_t{1} << bit;
        EXPECT_NE(random_words(1 ^ flip, 2, 3), words);
        EXPECT_NE(random_words(1, 2 ^ flip, 3), words);
        EXPECT_NE(random_words(1, 2, 3 ^ flip), words);
    }
}

TEST(Random, UniformAndNormalHaveTheirMoments) {
    constexpr int64_t kCount = 200000;
    double sum = 0, squares = 0, mean = 0, variance = 0, fourth = 0;
    for (int64_t i = 0; i < kCount; ++i) {
        const double u = random_uniform(7, 1, static_cast<uint64_t>(i));
        ASSERT_GE(u, 0.0);
        ASSERT_LT(u, 1.0);
        sum += u;
        squares += u * u;
        const double x = random_normal(7, 2, static_cast<uint64_t>(i));
        ASSERT_TRUE(std::isfinite(x));
        mean += x;
        variance += x * x;
        fourth += x * x * x * x;
    }
    // bounds: 5 standard deviations of each estimate
    EXPECT_NEAR(sum / kCount, 0.5, 5 * 0.2887 / std::sqrt(kCount));
    EXPECT_NEAR(squares / kCount, 1.0 / 3, 5 * 0.2981 / std::sqrt(kCount));
    EXPECT_NEAR(mean / kCount, 0.0, 5 / std::sqrt(kCount));
    EXPECT_NEAR(variance / kCount, 1.0, 5 * std::sqrt(2.0 / kCount));
    EXPECT_NEAR(fourth / kCount, 3.0, 5 * std::sqrt(96.0 / kCount));
}

}  // namespace
}  // namespace fp8flow
