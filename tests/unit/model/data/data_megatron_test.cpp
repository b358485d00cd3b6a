// SPDX-License-Identifier: MIT
// Megatron's .bin and .idx: good ones of every token type, the cut between what is trained on and what is
// held out, and a list of broken ones, each refused with its file and its numbers.
#include "model/data/megatron.h"

#include "tests/support/file_data.h"
#include "tests/support/files.h"

#include <algorithm>
#include <string>
#include <vector>

namespace fp8flow {

using namespace data;

namespace {

using Ids = std::vector<int64_t>;

// An index and its tokens with a free choice of every field, to build broken ones.
struct Dataset {
    std::string magic = std::string("MMIDIDX\0\0", 9);
    uint64_t version = 1;
    uint8_t code = 8;
    int width = 2;
    std::vector<int32_t> lengths;
    std::vector<int64_t> offsets, bounds;
    Ids ids;
    int64_t sequences = -1, num_bounds = -1;  // -1: as many as there are

    // Documents of sequences of tokens that count up from 0.
    static Dataset of(const std::vector<std::vector<int32_t>>& documents, uint8_t code = 8, int width = 2) {
        Dataset set{.code = code, .width = width};
        set.bounds.push_back(0);
        for (const auto& document : documents) {
            for (const int32_t length : document) {
                set.lengths.push_back(length);
                set.offsets.push_back(static_cast<int64_t>(set.ids.size()) * width);
                for (int32_t i = 0; i < length; ++i) set.ids.push_back(static_cast<int64_t>(set.ids.size()));
            }
            set.bounds.push_back(static_cast<int64_t>(set.lengths.size()));
        }
        return set;
    }

    template <class T> static void put(std::string& out, T value) {
        out.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    std::string index() const {
        std::string out = magic;
        put(out, version);
        put(out, code);
        put(out, sequences < 0 ? static_cast<int64_t>(lengths.size()) : sequences);
        put(out, num_bounds < 0 ? static_cast<int64_t>(bounds.size()) : num_bounds);
        for (const int32_t length : lengths) put(out, length);
        for (const int64_t offset : offsets) put(out, offset);
        for (const int64_t bound : bounds) put(out, bound);
        return out;
    }
    std::string bin() const {
        std::string out;
        for (const int64_t id : ids)
            out.append(reinterpret_cast<const char*>(&id), static_cast<size_t>(width));
        return out;
    }
    void write(const TemporaryFolder& folder, const std::string& name) const {
        folder.write(name + ".idx", index());
        folder.write(name + ".bin", bin());
    }
};

FileData options_of(const std::string& path, double held_out = 0.25, int64_t vocab = 1000) {
    return {.data_path = {path}, .held_out_fraction = held_out, .vocab_size = vocab, .seq_length = 8};
}

// The first tokens of all windows of an epoch, sorted; checks that each window counts up.
std::vector<int32_t> windows_of(const TokenSource& source, Split split) {
    std::vector<int32_t> firsts;
    for (int64_t i = 0; i < source.samples_per_epoch(split); ++i) {
        const std::vector<int32_t> tokens = tokens_of(source, split, i);
        for (size_t t = 0; t < tokens.size(); ++t) EXPECT_EQ(tokens[t], tokens[0] + static_cast<int32_t>(t));
        firsts.push_back(tokens[0]);
    }
    std::sort(firsts.begin(), firsts.end());
    return firsts;
}

std::string refusal_of(const std::string& path, int64_t vocab = 1000) {
    return error_of(ExitCode::data, [&] { MegatronSource(options_of(path, 0.25, vocab)); });
}

// The bytes of a small file written by hand from the format's description: two documents, three sequences,
// uint16.
TEST(Megatron, BytesByHand) {
    const unsigned char index[] = {
        'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0,  1, 0, 0, 0, 0, 0, 0, 0,  8, 3, 0, 0, 0, 0, 0,
        0,   0,   3,   0,   0,   0,   0,   0, 0,  0,                                              // counts
        5,   0,   0,   0,   4,   0,   0,   0, 1,  0, 0, 0,                                        // lengths
        0,   0,   0,   0,   0,   0,   0,   0, 10, 0, 0, 0, 0, 0, 0, 0, 18, 0, 0, 0, 0, 0, 0, 0,   // offsets
        0,   0,   0,   0,   0,   0,   0,   0, 2,  0, 0, 0, 0, 0, 0, 0, 3,  0, 0, 0, 0, 0, 0, 0};  // documents
    TemporaryFolder folder;
    folder.write("a.idx", std::string(reinterpret_cast<const char*>(index), sizeof index));
    EXPECT_EQ(Dataset::of({{5, 4}, {1}}).index(), read_whole(folder.path("a.idx")));
    const MegatronIndex read = read_megatron_index(folder.path("a.idx"), 0.5);
    EXPECT_EQ(read.type, TokenType::u16);
    EXPECT_EQ(read.sequences, 3);
    EXPECT_EQ(read.documents, 2);
    EXPECT_EQ(read.tokens, 10);
    EXPECT_EQ(read.held_out_from, 9);
}

TEST(Megatron, EveryTokenTypeAndEveryWayToNameIt) {
    const struct {
        uint8_t code;
        int width;
    } types[] = {{1, 1}, {8, 2}, {3, 2}, {4, 4}, {5, 8}};
    for (const auto& type : types) {
        SCOPED_TRACE(static_cast<int>(type.code));
        const TemporaryFolder folder;
        Dataset::of({{5, 0, 9}, {11}, {}, {1, 1, 13}}, type.code, type.width)
            .write(folder, "d/text_document");
        for (const char* name :
             {"d/text_document", "d/text_document.idx", "d/text_document.bin", "d", "d/*.idx", "d/*.bin"}) {
            const MegatronSource source(options_of(folder.path(name), 0.0, 256));
            EXPECT_EQ(source.num_tokens(Split::train), 40);
            EXPECT_EQ(source.num_tokens(Split::held_out), 0);
            EXPECT_EQ(windows_of(source, Split::train),
                      (std::vector<int32_t>{0, 8, 16, 24}));  // 40 - 1 targets
        }
    }
}

TEST(Megatron, TheLastDocumentsAreHeldOut) {
    const TemporaryFolder folder;
    Dataset::of({{10}, {10, 7}, {20}, {12}}).write(folder, "a");
    const auto cut = [&](double fraction) {
        const MegatronSource source(options_of(folder.path("a"), fraction));
        return std::pair{source.num_tokens(Split::train), source.num_tokens(Split::held_out)};
    };
    EXPECT_EQ(cut(0.0), (std::pair<int64_t, int64_t>{59, 0}));
    EXPECT_EQ(cut(0.01), (std::pair<int64_t, int64_t>{47, 12}));  // at least one
    EXPECT_EQ(cut(0.25), (std::pair<int64_t, int64_t>{47, 12}));
    EXPECT_EQ(cut(0.5), (std::pair<int64_t, int64_t>{27, 32}));
    const MegatronSource source(options_of(folder.path("a"), 0.5));
    EXPECT_EQ(windows_of(source, Split::train), (std::vector<int32_t>{0, 8, 16}));
    EXPECT_EQ(windows_of(source, Split::held_out), (std::vector<int32_t>{27, 35, 43}));
    // One document: its end.
    Dataset::of({{30, 10}}).write(folder, "b");
    const MegatronSource one(options_of(folder.path("b"), 0.25));
    EXPECT_EQ(one.num_tokens(Split::train), 30);
    EXPECT_EQ(windows_of(one, Split::held_out), (std::vector<int32_t>{30}));
}

TEST(Megatron, SeveralFilesAreOneStreamAndTheOrderIsThatOfASeed) {
    const TemporaryFolder folder;
    Dataset first = Dataset::of({{9}, {9}}), second = Dataset::of({{20}, {5}}, 4, 4);  // types may differ
    for (int64_t& id : second.ids) id += 9;  // goes on where the first file's train part ends
    first.write(folder, "a");
    second.write(folder, "b");
    FileData options = options_of(folder.path(), 0.5);
    const MegatronSource source(options);
    EXPECT_EQ(source.num_tokens(Split::train), 29);
    EXPECT_EQ(windows_of(source, Split::train),
              (std::vector<int32_t>{0, 8, 16}));  // the second spans both files
    const auto order = [](const TokenSource& s) {
        std::vector<int32_t> firsts;
        for (int64_t i = 0; i < 12; ++i) firsts.push_back(tokens_of(s, Split::train, i)[0]);
        return firsts;
    };
    EXPECT_EQ(order(source), order(MegatronSource(options)));
    EXPECT_EQ(source.fingerprint(), MegatronSource(options).fingerprint());
    options.seed = 2;
    EXPECT_NE(order(source), order(MegatronSource(options)));
    options = options_of(folder.path("a"), 0.5);
    EXPECT_NE(source.fingerprint(), MegatronSource(options).fingerprint());
    expect_contains(source.description(), "2 files, 4 documents; train 29 tokens; held-out 14 tokens");
}

TEST(Megatron, TheFingerprintIsThatOfTheTokens) {
    const TemporaryFolder folder;
    Dataset set = Dataset::of({{10}, {10, 7}, {20}, {12}});
    set.write(folder, "a");
    const auto source = [&] { return MegatronSource(options_of(folder.path("a"))); };
    const uint64_t first = source().fingerprint(), by_size = source().fingerprint_without_content();
    for (const size_t i : {size_t{0}, size_t{30}, set.ids.size() - 1}) {
        Dataset other = set;
        other.ids[i] += 1;
        other.write(folder, "a");
        EXPECT_NE(source().fingerprint(), first) << i;
        EXPECT_EQ(source().fingerprint_without_content(), by_size) << i;
    }
    set.write(folder, "a");
    EXPECT_EQ(source().fingerprint(), first);
    EXPECT_NE(MegatronSource(options_of(folder.path("a"), 0.5)).fingerprint_without_content(), by_size);
}

TEST(Megatron, WarnsOfWhatIsNamedTwiceAndOfAHeldOutPartFarFromItsShare) {
    const TemporaryFolder folder;
    Dataset::of({{10}, {10, 7}, {20}, {12}}).write(folder, "a");
    EXPECT_TRUE(MegatronSource(options_of(folder.path("a"))).warnings().empty());
    const auto far = MegatronSource(options_of(folder.path("a"), 0.05)).warnings();
    ASSERT_EQ(far.size(), 1u);
    expect_contains(far[0],
                    "20 % of the tokens are held out, though data.held_out_fraction is 0.05: the last of 4 "
                    "documents are");
    FileData options = options_of(folder.path("a"));
    options.data_path = {folder.path("a"), folder.path("a.bin"), folder.path("a.idx"), folder.path("a")};
    const MegatronSource source(options);
    EXPECT_EQ(source.num_tokens(Split::train), 47);
    ASSERT_EQ(source.warnings().size(), 1u);
    expect_contains(source.warnings()[0],
                    "each is read once an epoch: 3, for example " + folder.path("a.idx"));
    folder.write("b.bin", "the index was not copied");
    for (const char* entry : {"", "/*"}) {
        options.data_path = {folder.path() + entry};
        const std::vector<std::string> warnings = MegatronSource(options).warnings();
        ASSERT_EQ(warnings.size(), 1u);
        expect_contains(warnings[0], ".bin files without an .idx file, which are left out: 1, for example " +
                                         folder.path("b.bin"));
    }
}

TEST(Megatron, BrokenOnesAreRefusedWithFileAndNumbers) {
    const TemporaryFolder folder;
    int count = 0;
    const auto refuse = [&](const Dataset& set, const std::string& part, const std::string& file = ".idx",
                            const std::string& more = "") {
        const std::string name = "bad" + std::to_string(++count);
        folder.write(name + ".idx", set.index() + (file == ".idx" ? more : ""));
        folder.write(name + ".bin", set.bin() + (file == ".bin" ? more : ""));
        const std::string text = refusal_of(folder.path(name), 64);
        expect_contains(text, name + file);
        expect_contains(text, part);
    };
    const Dataset good = Dataset::of({{9, 9}, {9}, {9, 9}});
    EXPECT_NO_THROW((good.write(folder, "good"), MegatronSource(options_of(folder.path("good"), 0.25, 64))));
    const struct {
        void (*change)(Dataset&);
        const char* part;
        const char* file = ".idx";
    } wrong[] = {
        {[](Dataset& d) { d.magic[3] = 'x'; }, "does not begin with MMIDIDX"},
        {[](Dataset& d) { d.version = 2; }, "version 2, want 1"},
        {[](Dataset& d) { d.code = 0; }, "token type 0, want 1 to 8"},
        {[](Dataset& d) { d.code = 9; }, "token type 9"},
        {[](Dataset& d) { d.code = 255; }, "token type 255"},
        {[](Dataset& d) { d.code = 2; }, "type int8"},
        {[](Dataset& d) { d.code = 6; }, "type float64"},
        {[](Dataset& d) { d.code = 7; }, "type float32"},
        {[](Dataset& d) { d.sequences = 6; }, "truncated by 12 bytes: 6 sequences and 4 bounds"},
        {[](Dataset& d) { d.sequences = 4; }, "too long by 12 bytes"},
        {[](Dataset& d) { d.sequences = 0; }, "0 sequences"},
        {[](Dataset& d) { d.sequences = int64_t{1} << 62; }, "4611686018427387904 sequences"},
        {[](Dataset& d) { d.num_bounds = 1; }, "1 bounds"},
        // 8 times that is 32 in 64 bits
        {[](Dataset& d) { d.num_bounds = (int64_t{1} << 61) + 4; }, "bounds of documents"},
        {[](Dataset& d) { d.lengths[1] = -9; }, "sequence 1 has -9 tokens"},
        {[](Dataset& d) { d.lengths[1] = 8; }, "sequence 2 begins at byte 36, the one before ends at 34"},
        {[](Dataset& d) { d.offsets[0] = 2; }, "sequence 0 begins at byte 2"},
        {[](Dataset& d) { d.offsets[3] = -1; }, "sequence 3 begins at byte -1"},
        {[](Dataset& d) { d.bounds[0] = 1; }, "document 0 begins at sequence 1"},
        {[](Dataset& d) { d.bounds.back() = 4; }, "document 3 begins at sequence 4, want 0 first, 5 last"},
        {[](Dataset& d) { d.bounds[1] = 4; }, "document 2 begins at sequence 3"},
        {[](Dataset& d) { d.bounds[1] = 1000; }, "document 1 begins at sequence 1000"},
        {[](Dataset& d) { d.ids.pop_back(); },
         "truncated by 2 bytes: its index counts 45 tokens x 2 bytes = 90 bytes, the file has 88", ".bin"},
        {[](Dataset& d) { d.ids[44] = 64; }, "token 44 is 64, the vocabulary has 64 ids", ".bin"},
        {[](Dataset& d) { d.ids[44] = 65535; }, "token 44 is 65535", ".bin"},
    };
    for (const auto& [change, part, file] : wrong) {
        Dataset bad = good;
        change(bad);
        refuse(bad, part, file);
    }
    refuse(good, "multimodal", ".idx", std::string(5, '\0'));
    refuse(good, "too long by 1 bytes", ".idx", "x");
    refuse(good, "too long by 1 bytes", ".bin", "x");
    const struct {
        uint8_t code;
        int width;
        int64_t id;
    } ids[] = {{4, 4, -1}, {3, 2, -2}, {5, 8, int64_t{1} << 32}};  // the last is 0 in 32 bits
    for (const auto& [code, width, id] : ids) {
        Dataset bad = Dataset::of({{9, 9}, {9}}, code, width);
        bad.ids[3] = id;
        refuse(bad, fmt::format("token 3 is {}", id), ".bin");
    }
    // Every cut of the index.
    const std::string index = good.index();
    folder.write("cut.bin", good.bin());
    for (size_t size = 0; size < index.size(); ++size) {
        folder.write("cut.idx", index.substr(0, size));
        expect_contains(refusal_of(folder.path("cut"), 64), "cut.idx");
    }
}

TEST(Megatron, MissingAndForeignFiles) {
    const TemporaryFolder folder;
    const auto refusal = [&](const char* name) { return refusal_of(folder.path(name)); };
    folder.write("alone.idx", Dataset::of({{20}}).index());
    expect_contains(refusal("alone"), "alone.bin: No such file");
    expect_contains(refusal("nothing"), "nothing: No such file");
    folder.write("text/a.txt", "text");
    expect_contains(refusal("text"), "no .idx file");
    expect_contains(refusal("text/a.txt"), "neither an .idx nor a .bin file");
    Dataset::of({{4}, {20}}).write(folder, "short");
    expect_contains(refusal("short"), "the train part has 4 tokens, one sample needs seq_length + 1 = 9");
    // A file that changes while we train.
    const Dataset set = Dataset::of({{40}, {9}});
    set.write(folder, "changing");
    const MegatronSource source(options_of(folder.path("changing")));
    std::filesystem::resize_file(folder.path("changing.bin"), 60);
    expect_contains(error_of(ExitCode::data, [&] { tokens_of(source, Split::train, 0); }),
                    "changing.bin: changed since the start: 60 bytes, was 98");
}

// The note that scripts/preprocess_data.py leaves.
TEST(Megatron, VocabularyOfTheTokenizer) {
    TemporaryFolder folder;
    Dataset::of({{20}, {20}}).write(folder, "a");
    const auto refuse = [&](const std::string& note) {
        folder.write("a.json", note);
        return refusal_of(folder.path("a"));
    };
    folder.write("a.json", R"({"vocab_size": 1000})");
    EXPECT_EQ(MegatronSource(options_of(folder.path("a"))).vocab_size(), 1000);
    expect_contains(refuse(R"({"vocab_size": 1001})"), "the tokenizer has 1001 tokens, the model 1000");
    expect_contains(refuse(R"({"vocab_size": "many"})"), "vocab_size is \"many\"");
    expect_contains(refuse("{"), "a.json");
    folder.write("a.json", R"({"of": "another tool"})");
    EXPECT_EQ(MegatronSource(options_of(folder.path("a"))).vocab_size(), 1000);
    EXPECT_EQ(MegatronSource(options_of(folder.path("a"))).bytes_per_token(), std::nullopt);
    expect_contains(refuse(R"({"vocab_size": 1000, "state": {"tokens": 41, "bytes": 100}})"),
                    "a.json: counts 41 tokens and the .idx file next to it 40");
    folder.write("a.json", R"({"vocab_size": 1000, "state": {"tokens": 40, "bytes": 100}})");
    EXPECT_EQ(MegatronSource(options_of(folder.path("a"))).bytes_per_token(), 2.5);
    Dataset::of({{20}, {20}}).write(folder, "b");
    FileData both = options_of(folder.path("a"));
    both.data_path.push_back(folder.path("b"));
    EXPECT_EQ(MegatronSource(both).bytes_per_token(), std::nullopt);  // of b they are not known
}

}  // namespace
}  // namespace fp8flow
