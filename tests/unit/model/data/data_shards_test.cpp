// SPDX-License-Identifier: MIT
// llm.c token shards: good ones of both versions, and a list of broken ones, each refused with its file and
// its numbers.
#include "model/data/shards.h"

#include "tests/support/file_data.h"
#include "tests/support/files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace fp8flow {

using namespace data;

namespace {

using Ids = std::vector<int64_t>;

// A shard with a free choice of header and body, to build broken ones.
struct ShardBytes {
    int32_t magic = 20240520;
    int32_t version = 1;
    int32_t count = -1;  // -1: as many as there are ids
    int width = 2;
    Ids ids;

    std::string bytes() const {
        int32_t header[256] = {magic, version, count == -1 ? static_cast<int32_t>(ids.size()) : count};
        std::string out(reinterpret_cast<const char*>(header), sizeof header);
        for (const int64_t id : ids)
            out.append(reinterpret_cast<const char*>(&id), static_cast<size_t>(width));
        return out;
    }
};

Ids iota(int64_t first, int64_t count) {
    Ids ids(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ids[static_cast<size_t>(i)] = first + i;
    return ids;
}

std::string shard16(const Ids& ids) { return ShardBytes{.ids = ids}.bytes(); }
std::string shard32(const Ids& ids) {
    return ShardBytes{.magic = 20240801, .version = 7, .width = 4, .ids = ids}.bytes();
}

FileData options_of(const std::string& path, int64_t vocab = 1000) {
    return {.data_path = {path}, .vocab_size = vocab, .seq_length = 8};
}

TEST(Shards, ReadsBothVersionsAndWindowsThatSpanShards) {
    for (const int width : {2, 4}) {
        const TemporaryFolder folder;
        const auto shard = width == 2 ? shard16 : shard32;
        // The last token of each shard is the first of the next window but one: lengths 13, 1, 30 make
        // windows span two or three.
        folder.write("d/text_train_000001.bin", shard(iota(0, 13)));
        folder.write("d/text_train_000002.bin", shard(iota(13, 1)));
        folder.write("d/text_train_000003.bin", shard(iota(14, 30)));
        folder.write("d/text_val_000000.bin", shard(iota(500, 20)));
        for (const std::string& path : {folder.path("d"), folder.path("d/text_*.bin")}) {
            const ShardSource source(options_of(path));
            EXPECT_EQ(source.num_tokens(Split::train), 44);
            EXPECT_EQ(source.num_tokens(Split::held_out), 20);
            EXPECT_EQ(source.samples_per_epoch(Split::train), 5);
            std::vector<int32_t> firsts;
            for (int64_t i = 0; i < 5; ++i) {
                const std::vector<int32_t> tokens = tokens_of(source, Split::train, i);
                for (size_t t = 0; t < tokens.size(); ++t)
                    EXPECT_EQ(tokens[t], tokens[0] + static_cast<int32_t>(t));
                firsts.push_back(tokens[0]);
            }
            std::sort(firsts.begin(), firsts.end());
            EXPECT_EQ(firsts, (std::vector<int32_t>{0, 8, 16, 24, 32}));
            EXPECT_GE(tokens_of(source, Split::held_out, 0)[0], 500);
        }
    }
}

TEST(Shards, HoldsTheLargestIdsOfEachWidth) {
    const TemporaryFolder folder;
    Ids ids = iota(0, 20);
    ids[3] = 65535;
    folder.write("a_train.bin", shard16(ids));
    folder.write("a_val.bin", shard16(ids));
    const ShardSource narrow(options_of(folder.path("a_*.bin"), 65536));
    ids[3] = 2147483646;
    folder.write("b_train.bin", shard32(ids));
    folder.write("b_val.bin", shard32(ids));
    const ShardSource wide(options_of(folder.path("b_*.bin"), 2147483647));
    const auto times = [](const ShardSource& source, int32_t id) {
        int64_t found = 0;
        for (int64_t i = 0; i < source.samples_per_epoch(Split::train); ++i)
            found += std::ranges::count(tokens_of(source, Split::train, i), id);
        return found;
    };
    EXPECT_EQ(times(narrow, 65535), 1);
    EXPECT_EQ(times(wide, 2147483646), 1);
}

// Each broken train shard is next to a good held-out one; the error must name the file and say what is
// wrong.
TEST(Shards, RefusesBrokenShards) {
    const Ids good = iota(0, 40);
    const std::string whole = shard16(good), wide = shard32(good);
    const auto header = [&](size_t at, int32_t value, std::string bytes) {
        std::memcpy(bytes.data() + 4 * at, &value, 4);
        return bytes;
    };
    const auto with_id = [&](size_t at, int64_t id, int width) {
        Ids ids = good;
        ids[at] = id;
        return width == 2 ? shard16(ids) : shard32(ids);
    };
    struct Case {
        std::string bytes;
        std::string message;
    };
    const std::vector<Case> cases = {
        {"", "0 bytes, a token shard begins with a header of 1024"},
        {"x", "1 bytes, a token shard"},
        {whole.substr(0, 4), "4 bytes, a token shard"},
        {whole.substr(0, 1023), "1023 bytes, a token shard"},
        {whole.substr(0, 1024), "truncated by 80 bytes"},
        {whole.substr(0, 1025), "truncated by 79 bytes"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1104\n", "is a Git LFS pointer"},
        {whole.substr(0, whole.size() - 1),
         "truncated by 1 bytes: the header counts 40 tokens x 2 bytes + 1024 = 1104 bytes, the file has "
         "1103"},
        {whole.substr(0, whole.size() - 2), "truncated by 2 bytes"},
        {whole + '\0', "too long by 1 bytes"},
        {whole + std::string(2, '\0'), "too long by 2 bytes"},
        {whole + whole, "too long by 1104 bytes"},
        {wide.substr(0, wide.size() - 3), "truncated by 3 bytes: the header counts 40 tokens x 4 bytes"},
        {wide.substr(0, wide.size() - 4), "truncated by 4 bytes"},
        {wide + "ab", "too long by 2 bytes"},
        {header(0, 0, whole),
         "magic 0 is not that of a token shard (20240520 for uint16, 20240801 for uint32 tokens)"},
        {header(0, 20240521, whole), "magic 20240521 is not"},
        {header(0, 20240522, whole), "magic 20240522 is an evaluation file"},
        {header(0, 1347568641, whole), "magic 1347568641 is not"},
        {header(0, 0x08d73401, whole), "is not that of a token shard"},  // big-endian writer
        {header(0, 20240520 ^ (1 << 30), whole), "is not that of a token shard"},
        {header(0, 20240801, whole), "version 1 under magic 20240801, want 7"},
        {header(0, 20240520, wide), "version 7 under magic 20240520, want 1"},
        {header(1, 0, whole), "version 0 under magic 20240520, want 1"},
        {header(1, 2, whole), "version 2 under"},
        {header(1, -1, whole), "version -1 under"},
        {header(1, 6, wide), "version 6 under magic 20240801, want 7"},
        {header(2, 0, whole), "the header counts 0 tokens"},
        {header(2, 0, whole.substr(0, 1024)), "the header counts 0 tokens"},
        {header(2, -40, whole), "the header counts -40 tokens"},
        {header(2, INT32_MIN, whole), "the header counts -2147483648 tokens"},
        {header(2, INT32_MAX, whole), "truncated by 4294967214 bytes"},
        {header(2, INT32_MAX, wide), "truncated by 8589934428 bytes"},
        {header(2, 39, whole), "too long by 2 bytes"},
        {header(2, 41, whole), "truncated by 2 bytes"},
        {header(2, 20, wide), "too long by 80 bytes"},
        {header(2, 40 | (1 << 20), whole), "truncated by 2097152 bytes"},  // one flipped bit
        {with_id(0, 1000, 2), "token 0 is 1000, the vocabulary has 1000 ids"},
        {with_id(39, 65535, 2), "token 39 is 65535, the vocabulary has 1000 ids"},
        {with_id(17, 1000, 4), "token 17 is 1000, the vocabulary has 1000 ids"},
        {with_id(17, 3145940450, 4),
         "token 17 is 3145940450, the vocabulary has 1000 ids"},  // -1149026846 as int32
        {with_id(39, 4294967295, 4), "token 39 is 4294967295, the vocabulary has 1000 ids"},
        {with_id(39, 2147483648, 4), "token 39 is 2147483648, the vocabulary has 1000 ids"},
        {shard16(iota(0, 8)), "the train part has 8 tokens, one sample needs seq_length + 1 = 9"},
        {std::string(4096, 'A'), "is not that of a token shard"},
    };
    EXPECT_GE(cases.size(), 30u);
    for (const Case& broken : cases) {
        const TemporaryFolder folder;
        const bool is_wide =
            broken.bytes.size() >= 4 && std::memcmp(broken.bytes.data(), wide.data(), 4) == 0;
        folder.write("d/x_val_0.bin", is_wide ? wide : whole);
        const std::string path = folder.write("d/x_train_7.bin", broken.bytes);
        const std::string error =
            error_of(ExitCode::data, [&] { ShardSource source(options_of(folder.path("d"))); });
        expect_contains(error, broken.message);
        if (broken.message.find("train part") == std::string::npos) expect_contains(error, path + ":");
    }
}

TEST(Shards, RefusesWrongSetsOfFiles) {
    const TemporaryFolder folder;
    const std::string good = shard16(iota(0, 40));
    folder.write("train_only/x_train_0.bin", good);
    folder.write("val_only/x_val_0.bin", good);
    folder.write("unnamed/x_0.bin", good);
    folder.write("both/x_train_val_0.bin", good);
    folder.write("trainer/x_trainer_0.bin", good);
    folder.write("mixed/x_train_0.bin", good);
    folder.write("mixed/x_val_0.bin", shard32(iota(0, 40)));
    folder.write("none/readme.txt", "no shard");
    std::filesystem::create_directories(folder.path("pipe"));
    ASSERT_EQ(::mkfifo(folder.path("pipe/x_train_0.bin").c_str(), 0600), 0);
    const auto make = [&](const std::string& name) {
        return [path = folder.path(name)] { ShardSource source(options_of(path)); };
    };
    expect_contains(error_of(ExitCode::data, make("val_only")), "the train part has 0 tokens");
    expect_contains(error_of(ExitCode::data, make("unnamed")), "x_0.bin: cannot tell its part from its name");
    expect_contains(error_of(ExitCode::data, make("both")), "cannot tell its part");
    expect_contains(error_of(ExitCode::data, make("trainer")), "cannot tell its part");
    expect_contains(error_of(ExitCode::data, make("mixed")), "two tokenisers");
    expect_contains(error_of(ExitCode::data, make("none")), "the train part has 0 tokens");
    expect_contains(error_of(ExitCode::data, make("pipe")), "the train part has 0 tokens");
    expect_contains(error_of(ExitCode::data, make("missing")), "No such file");
    const ShardSource source(options_of(folder.path("train_only")));
    EXPECT_EQ(source.num_tokens(Split::held_out), 0);
    expect_contains(error_of(ExitCode::data, [&] { tokens_of(source, Split::held_out, 0); }),
                    "the data has no held-out part");
}

TEST(Shards, NoticesWhatHappensWhileTraining) {
    const TemporaryFolder folder;
    const std::string good = shard16(iota(0, 40));
    folder.write("x_val_0.bin", good);
    const std::string path = folder.write("x_train_0.bin", good);
    const ShardSource source(options_of(folder.path("x_*.bin")));
    const auto sample_all = [&] {
        for (int64_t i = 0; i < source.samples_per_epoch(Split::train); ++i)
            tokens_of(source, Split::train, i);
    };
    sample_all();
    folder.write("x_train_0.bin", good.substr(0, good.size() - 10));
    expect_contains(error_of(ExitCode::data, sample_all),
                    path + ": changed since the start: 1094 bytes, was 1104");
    folder.write("x_train_0.bin", good + "1234");
    expect_contains(error_of(ExitCode::data, sample_all), "changed since the start: 1108 bytes");
    std::string flipped = good;
    flipped[1024 + 2 * 20 + 1] = '\x80';
    folder.write("x_train_0.bin", flipped);
    expect_contains(error_of(ExitCode::data, sample_all),
                    path + ": token 20 is 32788, the vocabulary has 1000 ids");
    std::filesystem::remove(path);
    expect_contains(error_of(ExitCode::data, sample_all), path + ": No such file");
}

// Other tokens under the same names and sizes are other data; older checkpoints know names and sizes alone.
TEST(Shards, TheFingerprintIsThatOfTheTokens) {
    const TemporaryFolder folder;
    const std::string path = folder.path("x_*.bin");
    folder.write("x_val_0.bin", shard16(iota(0, 40)));
    folder.write("x_train_0.bin", shard16(iota(0, 40)));
    const auto fingerprint = [&] { return ShardSource(options_of(path)).fingerprint(); };
    const uint64_t first = fingerprint(),
                   by_size = ShardSource(options_of(path)).fingerprint_without_content();
    EXPECT_EQ(fingerprint(), first);
    EXPECT_NE(first, by_size);
    std::set<uint64_t> all = {first};
    for (const char* name : {"x_train_0.bin", "x_val_0.bin"})
        for (size_t i = 0; i < 40; ++i) {
            Ids ids = iota(0, 40);
            ids[i] += 100;
            folder.write(name, shard16(ids));
            all.insert(fingerprint());
            EXPECT_EQ(ShardSource(options_of(path)).fingerprint_without_content(), by_size);
            folder.write(name, shard16(iota(0, 40)));
        }
    EXPECT_EQ(all.size(), 81u);
    EXPECT_EQ(fingerprint(), first);
    std::filesystem::rename(folder.path("x_train_0.bin"), folder.path("x_train_1.bin"));
    EXPECT_NE(ShardSource(options_of(path)).fingerprint_without_content(), by_size);
}

// Of 200 MB of zeros with some tokens changed about 64 MiB are read: the ends of every file, and blocks at
// equal distances, so that a stretch of 256 KiB that changed is always seen.
TEST(Shards, OfLargeFilesTheFingerprintCoversBlocks) {
    const TemporaryFolder folder;
    constexpr int64_t kTokens = 50'000'000;
    for (const char* name : {"x_train_0.bin", "x_val_0.bin"}) {
        const std::string path =
            folder.write(name, ShardBytes{.count = static_cast<int32_t>(kTokens)}.bytes());
        std::filesystem::resize_file(path, 1024 + 2 * kTokens);
    }
    const auto fingerprint = [&] { return ShardSource(options_of(folder.path("x_*.bin"))).fingerprint(); };
    std::set<uint64_t> all = {fingerprint()};
    const auto change = [&](const char* name, int64_t token, int64_t count) {
        std::fstream file(folder.path(name), std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(1024 + 2 * token);
        for (int64_t i = 0; i < count; ++i) file.write("\1\0", 2);
        file.close();
        all.insert(fingerprint());
    };
    change("x_train_0.bin", 0, 1);
    change("x_train_0.bin", kTokens - 1, 1);
    change("x_val_0.bin", kTokens - 1, 1);
    change("x_train_0.bin", 12'345'678, 131072);
    EXPECT_EQ(all.size(), 5u);
    EXPECT_TRUE(all.contains(fingerprint()));
}

TEST(Shards, LargePartsAreCheckedWhenRead) {
    const TemporaryFolder folder;
    Ids ids = iota(0, 40);
    folder.write("x_val_0.bin", shard16(ids));
    ids[20] = 5000;
    const std::string path = folder.write("x_train_0.bin", shard16(ids));
    const ShardSource source(options_of(folder.path("x_*.bin")), 0);
    const auto sample_all = [&] {
        for (int64_t i = 0; i < 4; ++i) tokens_of(source, Split::train, i);
    };
    expect_contains(error_of(ExitCode::data, sample_all), path + ": token 20 is 5000");
}

}  // namespace
}  // namespace fp8flow
