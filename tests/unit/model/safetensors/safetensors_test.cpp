// SPDX-License-Identifier: MIT
// Safetensors files: what is written is read back bit by bit, in every element type and with awkward shapes;
// numbers convert exactly; models of several files; and files that change after they were opened.
#include "model/safetensors/json.h"
#include "model/safetensors/tensor_set.h"
#include "model/safetensors/writer.h"

#include "tests/support/files.h"
#include "tests/support/safetensors_bytes.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

namespace fp8flow {
namespace {

constexpr FileDType kAllTypes[] = {FileDType::boolean, FileDType::u8,   FileDType::i8,  FileDType::e5m2,
                                   FileDType::e4m3,    FileDType::e8m0, FileDType::i16, FileDType::u16,
                                   FileDType::f16,     FileDType::bf16, FileDType::i32, FileDType::u32,
                                   FileDType::f32,     FileDType::i64,  FileDType::u64, FileDType::f64};

std::string pattern(int64_t bytes, int seed) {
    std::string out(static_cast<size_t>(bytes), '\0');
    for (size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<char>(i * 31 + static_cast<size_t>(seed) * 7 + 1);
    return out;
}

std::string text_of(std::span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

// Writes with the given size of parts.
std::string written(const std::vector<TensorDeclaration>& tensors, const std::vector<std::string>& data,
                    const std::map<std::string, std::string>& metadata = {}, size_t part = 7) {
    std::string file;
    SafetensorsWriter writer(tensors, metadata, [&](const void* bytes, size_t count) {
        file.append(static_cast<const char*>(bytes), count);
    });
    for (size_t t = 0; t < tensors.size(); ++t)
        for (size_t at = 0; at < data[t].size(); at += part)
            writer.append(tensors[t].name, data[t].data() + at,
                          static_cast<int64_t>(std::min(part, data[t].size() - at)));
    writer.finish();
    EXPECT_EQ(static_cast<int64_t>(file.size()), writer.file_bytes());
    return file;
}

TEST(Safetensors, EveryTypeSurvivesTheRoundTrip) {
    std::vector<TensorDeclaration> tensors;
    std::vector<std::string> data;
    for (const FileDType dtype : kAllTypes) {
        for (const std::vector<int64_t>& shape :
             {std::vector<int64_t>{}, {3}, {2, 5}, {0}, {4, 0, 2}, {1, 2, 3, 1, 1, 1, 1, 2}}) {
            tensors.push_back(
                {fmt::format("{} {} \"q\" \\ \u00e9", name_of(dtype), tensors.size()), dtype, shape});
            data.push_back(pattern(*checked_bytes(dtype, shape), static_cast<int>(tensors.size())));
        }
    }
    const std::map<std::string, std::string> metadata = {
        {"format", "pt"}, {"", "empty key"}, {"k", "line\nend"}};
    const TemporaryFolder folder;
    const SafetensorsFile file(folder.write("all.safetensors", written(tensors, data, metadata)));
    EXPECT_EQ(file.header().metadata, metadata);
    EXPECT_EQ(file.header().data_start % 8, 0);
    ASSERT_EQ(file.tensors().size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const TensorEntry* entry = file.find(tensors[i].name);
        ASSERT_NE(entry, nullptr) << tensors[i].name;
        EXPECT_EQ(entry->dtype, tensors[i].dtype);
        EXPECT_EQ(entry->shape, tensors[i].shape);
        EXPECT_EQ(text_of(file.bytes(*entry)), data[i]) << tensors[i].name;
    }
    EXPECT_EQ(file.find("nothing"), nullptr);
}

TEST(Safetensors, AFileWithoutTensorsIsLegal) {
    const TemporaryFolder folder;
    EXPECT_TRUE(SafetensorsFile(folder.write("a.safetensors", written({}, {}))).tensors().empty());
    EXPECT_TRUE(
        SafetensorsFile(folder.write("b.safetensors", safetensors_bytes("{}", ""))).tensors().empty());
}

TEST(Safetensors, TensorsMayStandInAnyOrderAndSpacesFollowTheHeader) {
    const TemporaryFolder folder;
    const std::string header = R"({"b":{"shape":[1],"data_offsets":[2,4],"dtype":"BF16"},)"
                               R"("a":{"dtype":"U8","data_offsets":[0,2],"shape":[2]},)"
                               R"("z":{"dtype":"F32","shape":[0,7],"data_offsets":[2,2]}}      )";
    const SafetensorsFile file(folder.write("a.safetensors", safetensors_bytes(header, "wxyz")));
    EXPECT_EQ(text_of(file.bytes(*file.find("a"))), "wx");
    EXPECT_EQ(text_of(file.bytes(*file.find("b"))), "yz");
    EXPECT_EQ(file.find("z")->numel(), 0);
}

TEST(Safetensors, TheWriterRefusesWhatNoReaderWouldTake) {
    const auto sink = [](const void*, size_t) {};
    const auto refused = [&](const std::vector<TensorDeclaration>& tensors) {
        return error_of(ExitCode::internal, [&] { SafetensorsWriter(tensors, {}, sink); });
    };
    expect_contains(refused({{"", FileDType::u8, {1}}}), "tensor name");
    expect_contains(refused({{"a\n", FileDType::u8, {1}}}), "tensor name \"a\\n\"");
    expect_contains(refused({{"__metadata__", FileDType::u8, {1}}}), "tensor name");
    expect_contains(refused({{"a", FileDType::u8, {1}}, {"a", FileDType::u8, {1}}}), "tensor name \"a\"");
    expect_contains(refused({{"a", FileDType::u8, {-1}}}), "shape of tensor \"a\"");
    expect_contains(refused({{"a", FileDType::f32, {int64_t{1} << 62}}}), "shape of tensor \"a\"");
    expect_contains(
        refused({{"a", FileDType::u8, {int64_t{1} << 62}}, {"b", FileDType::u8, {int64_t{1} << 62}}}),
        "shape of tensor \"b\"");
    expect_contains(refused({{"a", FileDType::u8, std::vector<int64_t>(9, 1)}}), "shape of tensor \"a\"");
    SafetensorsWriter writer({{"a", FileDType::u8, {2}}, {"b", FileDType::u8, {2}}}, {}, sink);
    expect_contains(error_of(ExitCode::internal, [&] { writer.append("b", "xx", 2); }),
                    "wrote \"b\", want \"a\"");
    expect_contains(error_of(ExitCode::internal, [&] { writer.append("a", "xxx", 3); }),
                    "3 bytes more, 2 are missing");
    writer.append("a", "xx", 2);
    writer.append("b", "x", 1);
    expect_contains(error_of(ExitCode::internal, [&] { writer.finish(); }), "tensor \"b\" was not written");
    writer.append("b", "x", 1);
    writer.finish();
    expect_contains(error_of(ExitCode::internal, [&] { writer.append("b", "x", 1); }),
                    "want \"nothing more\"");
}

// One tensor of the given bytes as floats.
std::vector<float> floats(FileDType dtype, const std::string& bytes) {
    TensorEntry entry{"x",
                      dtype,
                      {static_cast<int64_t>(bytes.size()) / size_of(dtype)},
                      0,
                      static_cast<int64_t>(bytes.size())};
    std::vector<float> out(static_cast<size_t>(entry.numel()));
    read_floats(entry, {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, 0, out);
    return out;
}

TEST(Safetensors, NumbersConvertExactly) {
    const auto little = [](uint64_t value, int bytes) {
        std::string out;
        for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
        return out;
    };
    EXPECT_EQ(floats(FileDType::f32, little(0x3FC00000, 4) + little(0x80000000, 4)),
              (std::vector{1.5f, -0.0f}));
    EXPECT_EQ(floats(FileDType::f64, little(0x3FF8000000000000, 8)), std::vector{1.5f});
    EXPECT_EQ(floats(FileDType::bf16, little(0x3FC0, 2) + little(0xC000, 2)), (std::vector{1.5f, -2.0f}));
    EXPECT_EQ(floats(FileDType::f16, little(0x3E00, 2) + little(0x0001, 2) + little(0x7C00, 2)),
              (std::vector{1.5f, 0x1p-24f, std::numeric_limits<float>::infinity()}));
    EXPECT_EQ(floats(FileDType::e4m3, "\x3C\x01\x7E\xBC"), (std::vector{1.5f, 0x1p-9f, 448.0f, -1.5f}));
    EXPECT_TRUE(std::isnan(floats(FileDType::e4m3, "\x7F")[0]));
    EXPECT_EQ(floats(FileDType::e5m2, "\x3E\x01\x7B"), (std::vector{1.5f, 0x1p-16f, 57344.0f}));
    const std::string scales("\x00\x7F\x80\x01", 4);
    EXPECT_EQ(floats(FileDType::e8m0, scales), (std::vector{0x1p-127f, 1.0f, 2.0f, 0x1p-126f}));
    EXPECT_TRUE(std::isnan(floats(FileDType::e8m0, "\xFF")[0]));
    expect_contains(error_of(ExitCode::data, [&] { floats(FileDType::i32, "abcd"); }),
                    "tensor \"x\" is I32[1]");
    // at an odd address, and a part of a tensor
    const std::string bytes = "_" + little(0x40400000, 4) + little(0x3F800000, 4);
    TensorEntry entry{"x", FileDType::f32, {2}, 0, 8};
    float second = 0;
    read_floats(entry, {reinterpret_cast<const uint8_t*>(bytes.data()) + 1, 8}, 1, {&second, 1});
    EXPECT_EQ(second, 1.0f);
}

TEST(Safetensors, AFileThatShrinksIsRefusedByName) {
    const TemporaryFolder folder;
    const std::string path = folder.write("a.safetensors", written({{"a", FileDType::u8, {4}}}, {"abcd"}));
    const SafetensorsFile file(path);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    expect_contains(error_of(ExitCode::data, [&] { file.bytes(*file.find("a")); }), path + ": had ");
}

TEST(Safetensors, LinksAreFollowed) {
    const TemporaryFolder folder;
    const std::string path = folder.write("a.safetensors", written({}, {}));
    std::filesystem::create_symlink(path, folder.path("link.safetensors"));
    EXPECT_NO_THROW(SafetensorsFile(folder.path("link.safetensors")));
}

// ---- models of several files
class ShardedModel : public testing::Test {
protected:
    void SetUp() override {
        folder.write("m-1.safetensors",
                     written({{"a", FileDType::u8, {2}}, {"b", FileDType::u8, {1}}}, {"xy", "z"}));
        folder.write("m-2.safetensors", written({{"c", FileDType::u8, {1}}}, {"w"}));
        index(
            R"({"metadata":{"total_size":4,"more":[{"x":null}]},"weight_map":{"a":"m-1.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}})");
    }
    void index(const std::string& text) const { folder.write("model.safetensors.index.json", text); }

    TemporaryFolder folder;
};

TEST_F(ShardedModel, IsReadThroughItsIndexOrItsFolder) {
    for (const std::string& path : {folder.path(), folder.path("model.safetensors.index.json")}) {
        const TensorSet set(path);
        EXPECT_EQ(set.names(), (std::vector<std::string>{"a", "b", "c"}));
        EXPECT_EQ(text_of(set.find("a").bytes()), "xy");
        EXPECT_EQ(text_of(set.find("c").bytes()), "w");
        EXPECT_FALSE(set.find("d"));
    }
}

TEST_F(ShardedModel, FilesThatAreNotAskedForMayBeAbsent) {
    std::filesystem::remove(folder.path("m-2.safetensors"));
    const TensorSet set(folder.path());
    EXPECT_EQ(text_of(set.find("b").bytes()), "z");
    expect_contains(error_of(ExitCode::data, [&] { set.find("c"); }), "m-2.safetensors: No such file");
}

TEST_F(ShardedModel, EachFileHoldsWhatTheIndexGivesIt) {
    index(R"({"weight_map":{"a":"m-1.safetensors","c":"m-1.safetensors","d":"m-2.safetensors"}})");
    expect_contains(error_of(ExitCode::data, [&] { TensorSet(folder.path()).find("a"); }),
                    "m-1.safetensors: tensor \"c\" is missing, the index puts it here");
    // what the index leaves out is the caller's to judge
    index(R"({"weight_map":{"a":"m-1.safetensors"}})");
    const TensorSet set(folder.path());
    EXPECT_EQ(text_of(set.find("a").bytes()), "xy");
    EXPECT_FALSE(set.find("b"));
    ASSERT_EQ(set.unindexed().size(), 1u);
    EXPECT_EQ(set.unindexed()[0].entry->name, "b");
    EXPECT_EQ(text_of(set.unindexed()[0].bytes()), "z");
    EXPECT_EQ(set.unread(), std::vector<std::string>{"m-2.safetensors"});
    index(R"({"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})");
    expect_contains(error_or_none(ExitCode::data, [&] { TensorSet(folder.path()).find("a"); }),
                    "holds tensor \"b\", which the index puts into m-2.safetensors");
}

TEST_F(ShardedModel, PointersOfGitLfsAreCalledThat) {
    const std::string pointer =
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4983068496\n";
    for (const char* name : {"m-1.safetensors", "model.safetensors.index.json"}) {
        folder.write(name, pointer);
        expect_contains(error_of(ExitCode::data, [&] { TensorSet(folder.path()).find("a"); }),
                        std::string(name) + ": is a Git LFS pointer, not the file itself");
    }
    expect_contains(error_of(ExitCode::usage, [&] { parse_json(pointer, "config.json", ExitCode::usage); }),
                    "config.json: is a Git LFS pointer");
    EXPECT_FALSE(is_lfs_pointer("version 2 of a text"));
    EXPECT_FALSE(is_lfs_pointer(""));
}

TEST_F(ShardedModel, AFolderWithoutIndexHoldsOneFile) {
    std::filesystem::remove(folder.path("model.safetensors.index.json"));
    expect_contains(error_of(ExitCode::data, [&] { TensorSet(folder.path()); }),
                    "holds 2 .safetensors files");
    std::filesystem::remove(folder.path("m-1.safetensors"));
    EXPECT_EQ(TensorSet(folder.path()).names(), std::vector<std::string>{"c"});
    folder.write("model.safetensors", written({{"d", FileDType::u8, {1}}}, {"v"}));
    EXPECT_EQ(TensorSet(folder.path()).names(), std::vector<std::string>{"d"});
}

TEST(Safetensors, ManyProblemsAreListedWithTheirNumber) {
    std::vector<std::string> problems(103, "problem");
    const std::string text = error_or_none(ExitCode::data, [&] { throw_problems(problems, ExitCode::data); });
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 100);
    EXPECT_TRUE(text.ends_with("and 3 more"));
    throw_problems({}, ExitCode::data);
}

}  // namespace
}  // namespace fp8flow
