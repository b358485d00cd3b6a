// SPDX-License-Identifier: MIT
// Byte-level text: which files are read, how they are split, and that held-out text is never trained on.
#include "model/data/text.h"

#include "model/data/files.h"
#include "model/data/permutation.h"
#include "model/train/trainer.h"
#include "tests/support/file_data.h"
#include "tests/support/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace fp8flow {

using namespace data;

namespace {

using Paths = std::vector<std::string>;

std::string as_text(const std::vector<int32_t>& tokens) {
    std::string text;
    for (const int32_t token : tokens) text += token == kEndOfDocument ? '|' : static_cast<char>(token);
    return text;
}

// Of a file or folder; nothing is held out unless said.
FileData text_in(const std::string& path, int64_t seq_length, double held_out = 0.0) {
    return {.data_path = {path}, .held_out_fraction = held_out, .seq_length = seq_length};
}

TEST(DataFiles, BracesAreLists) {
    const TemporaryFolder folder;
    for (const char* name : {"a1.txt", "b2.txt", "c3.txt"}) folder.write(name, "x");
    EXPECT_EQ(list_data_files({folder.path("{a,b}{1,2,3}.txt")}, {}).files.size(), 2u);
    EXPECT_EQ(list_data_files({folder.path("{a{1,2},c*}.{txt,md}")}, {}).files.size(), 2u);
}

std::vector<std::string> relatives(const Paths& entries, const Paths& extensions = {}) {
    std::vector<std::string> names;
    for (const DataFile& file : list_data_files(entries, extensions).files) names.push_back(file.relative);
    return names;
}

// Every line of every file names its file, so that a token window tells where it comes from.
void write_labelled_files(const TemporaryFolder& folder, int count) {
    for (int i = 0; i < count; ++i) {
        std::string text;
        for (int line = 0; line < 40; ++line) text += "<f" + std::to_string(i) + ">";
        folder.write("corpus/d" + std::to_string(i % 7) + "/f" + std::to_string(i) + ".txt", text);
    }
}

std::set<std::string> labels_in(const std::string& text) {
    std::set<std::string> labels;
    for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at + 1)) {
        const size_t end = text.find('>', at);
        if (end != std::string::npos) labels.insert(text.substr(at + 1, end - at - 1));
    }
    return labels;
}

TEST(DataFiles, ExpandsFilesFoldersAndGlobs) {
    const TemporaryFolder folder;
    folder.write("c/b.h", "b");
    folder.write("c/a.txt", "a");
    folder.write("c/sub/deep/vector", "v");
    folder.write("c/.hidden", "x");
    folder.write("c/.git/config", "x");
    EXPECT_EQ(relatives({folder.path("c")}), (Paths{"a.txt", "b.h", "sub/deep/vector"}));
    EXPECT_EQ(relatives({folder.path("c/")}), (Paths{"a.txt", "b.h", "sub/deep/vector"}));
    EXPECT_EQ(relatives({folder.path("c")}, {".h", ""}), (Paths{"b.h", "sub/deep/vector"}));
    EXPECT_EQ(relatives({folder.path("c/b.h")}, {".txt"}),
              (Paths{"b.h"}));  // named itself: the filter does not apply
    EXPECT_EQ(relatives({folder.path("c/*.?xt")}), (Paths{"a.txt"}));
    EXPECT_EQ(relatives({folder.path("*/sub")}), (Paths{"c/sub/deep/vector"}));
    EXPECT_EQ(relatives({folder.path("c"), folder.path("c/sub"), folder.path("c/a.txt")}).size(),
              3u);  // reached twice
}

TEST(DataFiles, BracesNameSeveralPlacesOfWhichSomeExist) {
    const TemporaryFolder folder;
    folder.write("c/a.txt", "a");
    folder.write("lib/py3.12/os.py", "o");
    folder.write("lib/py3.12/os.txt", "o");
    EXPECT_EQ(relatives({folder.path("{none,c,nowhere/*/deep,lib/py3*}")}, {".txt"}),
              (Paths{"c/a.txt", "lib/py3.12/os.txt"}));
    EXPECT_EQ(relatives({"{" + folder.path("none") + "," + folder.path("c") + "}/a.*"}).size(), 1u);
    expect_contains(error_of(ExitCode::data, [&] { list_data_files({folder.path("{none/*,c/*.md}")}, {}); }),
                    "no file matches");
}

TEST(DataFiles, SurvivesLoopsOfLinksAndSpecialFiles) {
    const TemporaryFolder folder;
    folder.write("c/a.txt", "a");
    std::filesystem::create_directory_symlink(folder.path("c"), folder.path("c/loop"));
    std::filesystem::create_directory_symlink("..", folder.path("c/up"));
    std::filesystem::create_symlink("self", folder.path("c/self"));
    std::filesystem::create_symlink("nowhere", folder.path("c/broken"));
    std::filesystem::create_symlink("a.txt", folder.path("c/z.txt"));  // one file under two names
    ASSERT_EQ(::mkfifo(folder.path("c/pipe").c_str(), 0600), 0);
    EXPECT_EQ(relatives({folder.path("c")}), (Paths{"a.txt"}));
    std::filesystem::create_directory_symlink(folder.path("c"), folder.path("link"));
    EXPECT_EQ(relatives({folder.path("link")}), (Paths{"a.txt"}));  // an entry may be a link itself
}

// What entries name without effect is counted. A link back into the folder hides nothing.
TEST(DataFiles, WarnsOfFilesNamedTwiceAndOfLinksThatAreNotFollowed) {
    const TemporaryFolder folder;
    folder.write("c/a.txt", "a");
    folder.write("c/b.txt", "b");
    folder.write("other/x.txt", "x");
    const auto warnings = [&](const Paths& entries, const Paths& extensions = {}) {
        return list_data_files(entries, extensions).warnings;
    };
    const std::string a = folder.path("c/a.txt"), b = folder.path("c/b.txt");
    EXPECT_EQ(warnings({a, b}), Paths{});
    EXPECT_EQ(warnings({folder.path("c"), folder.path("other")}), Paths{});
    for (const Paths& entries : {Paths{a, b, a, a, a}, {folder.path("c"), a, folder.path("c/?.txt")}}) {
        const auto twice = warnings(entries);
        ASSERT_EQ(twice.size(), 1u);
        expect_contains(twice[0], "files that are named again, each is read once an epoch: 3, for example ");
        expect_contains(twice[0], a);
    }
    std::filesystem::create_directory_symlink(folder.path("c"), folder.path("c/loop"));
    EXPECT_EQ(warnings({folder.path("c")}), Paths{});
    std::filesystem::create_directory_symlink("../other", folder.path("c/more"));
    auto links = warnings({folder.path("c")});
    ASSERT_EQ(links.size(), 1u);
    expect_contains(links[0], "of its own): 1, for example " + folder.path("c/more"));
    EXPECT_EQ(warnings({folder.path("c"), folder.path("other")}), Paths{});  // reached all the same
    std::filesystem::create_symlink("nowhere.txt", folder.path("c/broken.txt"));
    links = warnings({folder.path("c")});
    ASSERT_EQ(links.size(), 1u);
    expect_contains(links[0], "of its own): 2, for example " + folder.path("c/broken.txt"));
    EXPECT_EQ(warnings({folder.path("c"), folder.path("other")}, {".md"}), Paths{});  // not asked for
}

TEST(DataFiles, RefusesWithPathAndReason) {
    const TemporaryFolder folder;
    folder.write("c/a.txt", "a");
    ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
    const auto refusal = [](const Paths& entries) {
        return error_of(ExitCode::data, [&] { list_data_files(entries, {}); });
    };
    expect_contains(refusal({}), "data.data_path is empty");
    expect_contains(refusal({""}), "empty entry");
    expect_contains(refusal({folder.path("none")}), folder.path("none") + ": No such file");
    expect_contains(refusal({folder.path("c/*.md")}), "no file matches");
    expect_contains(refusal({folder.path("pipe")}), "neither a regular file nor a folder");
    expect_contains(refusal({folder.path("c/a.txt/x")}), "Not a directory");
    expect_contains(error_of(ExitCode::data, [&] { read_data_file(folder.path("pipe"), 10); }),
                    folder.path("pipe"));
}

TEST(Text, HeldOutTextIsNeverTrainedOn) {
    const TemporaryFolder folder;
    write_labelled_files(folder, 120);
    const TextSource source(FileData{
        .data_path = {folder.path("corpus")}, .held_out_fraction = 0.2, .seq_length = 50, .seed = 4});
    std::set<std::string> seen[2];
    for (const Split split : {Split::train, Split::held_out})
        for (int64_t i = 0; i < 3 * source.samples_per_epoch(split); ++i)
            seen[static_cast<size_t>(split)].merge(labels_in(as_text(tokens_of(source, split, i))));
    EXPECT_EQ(seen[0].size() + seen[1].size(), 120u);
    for (const std::string& label : seen[1]) EXPECT_EQ(seen[0].count(label), 0u) << label;
    EXPECT_GE(seen[1].size(), 12u);  // 24 +- 2.7 sigma
    EXPECT_LE(seen[1].size(), 36u);
}

TEST(Text, TheSplitDependsOnTheRelativePathOnly) {
    const TemporaryFolder one, two;
    write_labelled_files(one, 60);
    write_labelled_files(two, 60);
    two.write("corpus/zz/extra.txt", "some more text that the first folder does not have");
    const TextSource a(text_in(one.path("corpus"), 16, 0.1));
    const TextSource b(FileData{.data_path = {two.path("corpus")}, .seq_length = 16, .seed = 99});
    for (const Split split : {Split::train, Split::held_out})
        for (const std::string& file : a.files(split)) {
            const auto& others = b.files(split);
            EXPECT_NE(std::find(others.begin(), others.end(), file), others.end())
                << file << " changed sides";
            EXPECT_EQ(is_held_out(file, 0.1), split == Split::held_out);
        }
    EXPECT_NE(a.fingerprint(), b.fingerprint());
    EXPECT_NE(a.fingerprint(), TextSource(text_in(one.path("corpus"), 16, 0.2)).fingerprint());
    std::filesystem::rename(one.path("corpus/d0/f0.txt"), one.path("corpus/d0/f00.txt"));
    EXPECT_NE(a.fingerprint(), TextSource(text_in(one.path("corpus"), 16, 0.1)).fingerprint());
    // Fixed for ever: a change of the hash would move held-out text of old runs into the train part of new
    // ones.
    EXPECT_EQ(fnv1a64("a"), 0xaf63dc4c8601ec8cULL);
    int held_out = 0;
    for (int i = 0; i < 10000; ++i) held_out += is_held_out("dir/file" + std::to_string(i), 0.1) ? 1 : 0;
    EXPECT_NEAR(held_out, 1000, 120);
}

TEST(Text, EveryTokenOfAnEpochIsVisitedOnceAndEpochsDiffer) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 400; ++i) text += static_cast<char>('a' + i % 26);
    folder.write("t/one.txt", text);
    folder.write("t/two.txt", text + "!");
    const TextSource source(text_in(folder.path("t"), 10));
    EXPECT_EQ(source.num_tokens(Split::train), 400 + 401 + 2);
    EXPECT_EQ(source.num_tokens(Split::held_out), 0);
    const int64_t windows = source.samples_per_epoch(Split::train);
    EXPECT_EQ(windows, 80);
    std::vector<std::string> epochs[2];
    for (int64_t i = 0; i < 2 * windows; ++i)
        epochs[i / windows].push_back(as_text(tokens_of(source, Split::train, i)));
    EXPECT_NE(epochs[0], epochs[1]);
    std::sort(epochs[0].begin(), epochs[0].end());
    std::sort(epochs[1].begin(), epochs[1].end());
    EXPECT_EQ(epochs[0], epochs[1]);
    const std::string stream = text + "|" + text + "!|";
    std::vector<std::string> expected;
    for (int64_t w = 0; w < windows; ++w) expected.push_back(stream.substr(static_cast<size_t>(w) * 10, 11));
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(epochs[0], expected);
}

TEST(Text, BytesAreTokensAndDocumentsEndWith256) {
    const TemporaryFolder folder;
    std::string bytes = "x";
    for (int i = 1; i < 256; ++i) bytes += static_cast<char>(i);
    folder.write("t/a", bytes);
    const TextSource source(text_in(folder.path("t/a"), 256));
    EXPECT_EQ(source.vocab_size(), 257);
    const std::vector<int32_t> tokens = tokens_of(source, Split::train, 0);
    EXPECT_EQ(tokens[0], 'x');
    for (int32_t i = 1; i < 256; ++i) EXPECT_EQ(tokens[static_cast<size_t>(i)], i);
    EXPECT_EQ(tokens[256], kEndOfDocument);
}

TEST(Text, LeavesOutBinaryEmptyAndCopiedFiles) {
    const TemporaryFolder folder;
    folder.write("t/a.txt", std::string(100, 'a'));
    folder.write("t/b.txt", std::string(100, 'b'));
    folder.write("t/copy_of_b.txt", std::string(100, 'b'));
    folder.write("t/empty.txt", "");
    folder.write("t/binary.o", std::string("ELF\0code", 8) + std::string(100, 'c'));
    folder.write("t/late_zero.txt",
                 std::string(4096, 'd') + std::string(1, '\0'));  // past the first 4 KiB: text
    const TextSource source(text_in(folder.path("t"), 8));
    EXPECT_EQ(source.files(Split::train), (Paths{"a.txt", "b.txt", "late_zero.txt"}));
    expect_contains(source.description(), "left out 1 binary, 1 empty, 1 copies");
    EXPECT_EQ(source.warnings(), Paths{});
    // What is named itself is missed.
    FileData files = text_in(folder.path("t/a.txt"), 8);
    for (const char* name : {"b.txt", "copy_of_b.txt", "empty.txt", "binary.o"})
        files.data_path.push_back(folder.path("t/") + name);
    const TextSource named(files);
    ASSERT_EQ(named.warnings().size(), 3u);
    expect_contains(named.warnings()[0], "t/binary.o is not read: it is binary");
    expect_contains(named.warnings()[1], "t/copy_of_b.txt is not read: it is a copy of another");
    expect_contains(named.warnings()[2], "t/empty.txt is not read: it is empty");
}

TEST(Text, CutsAtTheLimitOfBytes) {
    const TemporaryFolder folder;
    for (const char* name : {"t/a", "t/b", "t/c"}) folder.write(name, std::string(100, name[2]));
    const auto source = [&](int64_t limit) {
        FileData options = text_in(folder.path("t"), 8);
        options.max_bytes = limit;
        return TextSource(options);
    };
    const auto tokens = [&](int64_t limit) {
        const bool cut = source(limit).description().find("cut at data.max_bytes") != std::string::npos;
        return std::pair(source(limit).num_tokens(Split::train), cut);
    };
    EXPECT_EQ(tokens(300), std::pair(int64_t{303}, false));
    EXPECT_EQ(tokens(299), std::pair(int64_t{302}, true));
    EXPECT_EQ(tokens(200), std::pair(int64_t{202}, true));
    EXPECT_EQ(tokens(150), std::pair(int64_t{152}, true));
    EXPECT_EQ(source(300).warnings(), Paths{});
    ASSERT_EQ(source(150).warnings().size(), 1u);
    EXPECT_EQ(
        source(150).warnings()[0],
        "data.max_bytes = 150 cuts the text: 150 of 300 bytes are read, of 2 of 3 files; raise it to read "
        "more");
    // Other tokens, other data, also where the file that is cut is known to its end.
    std::set<uint64_t> fingerprints;
    for (const int64_t limit : {150, 198, 199, 200, 298, 299, 300})
        fingerprints.insert(source(limit).fingerprint());
    EXPECT_EQ(fingerprints.size(), 7u);
    EXPECT_EQ(source(300).fingerprint(), source(1000).fingerprint());
    EXPECT_EQ(source(300).fingerprint(), source(300).fingerprint_without_content());
}

// Whole files are held out: of few, far from the share that was asked for, and no file is blamed for it.
TEST(Text, WarnsOfAHeldOutPartFarFromItsShare) {
    const auto warnings = [](std::vector<size_t> lengths, double fraction = 0.1) {
        const TemporaryFolder folder;
        for (size_t i = 0; i < lengths.size(); ++i)
            folder.write(fmt::format("t/{}", i), std::string(lengths[i], static_cast<char>('a' + i)));
        return TextSource(text_in(folder.path("t"), 8, fraction)).warnings();
    };
    ASSERT_EQ(warnings({999, 999}).size(), 1u);
    EXPECT_EQ(
        warnings({999, 999})[0],
        "50 % of the tokens are held out, though data.held_out_fraction is 0.1: whole files are, here 1 "
        "of 2; name more files, or divide large ones");
    EXPECT_EQ(warnings({999, 999}, 0.5), Paths{});
    EXPECT_EQ(warnings({999, 999}, 0.0), Paths{});
    EXPECT_EQ(warnings({999}), Paths{});
    EXPECT_EQ(warnings({9999, 20}, 0.3).size() + warnings({20, 9999}, 0.3).size(), 2u);  // one has too little
}

TEST(Text, BothPartsExistForAnyNumberOfFiles) {
    for (int count = 1; count <= 12; ++count) {
        const TemporaryFolder folder;
        write_labelled_files(folder, count);
        for (const double fraction : {0.01, 0.5, 0.99}) {
            const TextSource source(text_in(folder.path("corpus"), 1, fraction));
            EXPECT_GT(source.num_tokens(Split::train), 1) << count << " files, " << fraction;
            EXPECT_GT(source.num_tokens(Split::held_out), 1) << count << " files, " << fraction;
            // the file that changes sides is the nearest one
            for (const std::string& held_out : source.files(Split::held_out))
                for (const std::string& train : source.files(Split::train))
                    EXPECT_LE(mix64(fnv1a64(held_out)), mix64(fnv1a64(train))) << held_out << " " << train;
        }
    }
}

TEST(Text, ASingleFileIsCutAtALineEnd) {
    const TemporaryFolder folder;
    std::string text;
    for (int i = 0; i < 100; ++i) text += "line " + std::to_string(1000 + i) + "\n";  // 10 bytes each
    folder.write("input.txt", text);
    const TextSource source(text_in(folder.path("input.txt"), 9, 0.095));
    EXPECT_EQ(source.num_tokens(Split::train), 910 + 1);  // byte 905 is inside line 91
    EXPECT_EQ(source.num_tokens(Split::held_out), 90 + 1);
    std::set<std::string> train;
    for (int64_t i = 0; i < source.samples_per_epoch(Split::train); ++i)
        train.insert(as_text(tokens_of(source, Split::train, i)));
    for (int64_t i = 0; i < source.samples_per_epoch(Split::held_out); ++i)
        EXPECT_EQ(train.count(as_text(tokens_of(source, Split::held_out, i))), 0u);
    expect_contains(source.description(), "one file: its end is held out");
}

TEST(Text, SaysWhatIsWrongWithPathAndNumbers) {
    const TemporaryFolder folder;
    folder.write("bin/a.bin", std::string(10, '\0'));
    folder.write("bin/b.bin", "");
    folder.write("bin/c.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
    folder.write("short/a.txt", "hello");
    folder.write("mixed/a.txt", std::string(1000, 'a'));
    folder.write("mixed/b.txt", std::string(10, 'b'));
    std::filesystem::create_directories(folder.path("empty"));
    const auto refusal = [](const FileData& options) {
        return error_of(ExitCode::data, [&] { TextSource source(options); });
    };
    expect_contains(
        refusal({.data_path = {folder.path("bin")}}),
        folder.path("bin") +
            ": no text: 3 files found, of which 1 binary (a zero byte in the first 4 KiB), 1 empty, "
            "1 Git LFS pointers (git lfs pull");
    expect_contains(refusal({.data_path = {folder.path("empty")}}), "no text: 0 files found");
    expect_contains(refusal({.data_path = {folder.path("none")}}), "No such file");
    expect_contains(
        refusal(text_in(folder.path("short"), 6)),
        folder.path("short") + ": the train part has 6 tokens, one sample needs seq_length + 1 = 7");
    expect_contains(refusal(text_in(folder.path("mixed"), 128, 0.1)),
                    "part has 11 tokens, one sample needs seq_length + 1 = 129");
}

// Bytes are no ids of another vocabulary, whoever states its size; a model of bytes takes them.
TEST(Text, IsRefusedWithTheVocabularyOfAnImportedModel) {
    const TemporaryFolder folder;
    folder.write("a.txt", std::string(100, 'a'));
    std::vector<std::string> text = {"data.data_kind=text", "model.seq_length=8", "training.eval_iters=0",
                                     "data.held_out_fraction=0", "data.data_path=" + folder.path()};
    const auto config = [&](const char* vocab) {
        const ImportedModel model{.settings = {{"model.vocab_size", vocab, "config.json"}},
                                  .name = "config.json: model_type qwen3_moe"};
        return parse_config("model:\n", "t.yaml", text, std::nullopt, model);
    };
    const auto refusal = [&](const char* vocab) {
        return error_of(ExitCode::usage, [&] { open_data(config(vocab)); });
    };
    for (const char* vocab : {"258", "384", "1000", "151936"}) {
        expect_contains(refusal(vocab), fmt::format("got text for config.json: model_type qwen3_moe with "
                                                    "model.vocab_size {}, want 257 with it",
                                                    vocab));
        expect_contains(refusal(vocab), "Megatron-LM's tools/preprocess_data.py");
    }
    EXPECT_NO_THROW(open_data(config("257")));
    EXPECT_NO_THROW(open_data(parse_config("model: {vocab_size: 1000}", "t.yaml", text)));
    text.emplace_back("model.vocab_size=1000");
    expect_contains(refusal("257"), "with model.vocab_size 1000");
}

TEST(Text, SamplesAreEqualInTwoProcessesAndChangeWithTheSeed) {
    const TemporaryFolder folder;
    write_labelled_files(folder, 30);
    const FileData options{.data_path = {folder.path("corpus")}, .seq_length = 33, .seed = 1};
    FileData other = options;
    other.seed = 2;
    const TextSource a(options), b(options), c(other);
    EXPECT_EQ(a.fingerprint(), b.fingerprint());
    int equal = 0;
    for (int64_t i = 0; i < 50; ++i) {
        EXPECT_EQ(tokens_of(a, Split::train, i), tokens_of(b, Split::train, i));
        equal += tokens_of(a, Split::train, i) == tokens_of(c, Split::train, i) ? 1 : 0;
    }
    EXPECT_LT(equal, 10);
}

}  // namespace
}  // namespace fp8flow
