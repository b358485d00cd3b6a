// SPDX-License-Identifier: MIT
// scripts/preprocess_data.py with a tokenizers package of a few lines (a token per byte): what it writes,
// that training reads it, that an interrupted run goes on to the same files, and what it refuses.
#include "tests/cli/command.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace fp8flow {
namespace {

// Ids are bytes; 256 ends a document. STOP_AFTER texts the process ends, as if killed.
constexpr const char* kTokenizers = R"(
import array
import os
seen = 0
class Encoding:
    def __init__(self, text): self.ids = list(text.encode())
class Tokenizer:
    @staticmethod
    def from_file(path): return Tokenizer()
    def no_truncation(self): pass
    def no_padding(self): pass
    def to_str(self): return "bytes"
    def token_to_id(self, token): return 256 if token == "<end>" else None
    def get_vocab(self, with_added_tokens): return {str(i): i for i in range(257)}
    def encode_batch_fast(self, texts, add_special_tokens):
        global seen
        seen += len(texts)
        if seen > int(os.environ.get("STOP_AFTER", 1 << 60)): os._exit(9)
        return [Encoding(text) for text in texts]
    def encode(self, text, add_special_tokens): return Encoding(text)
    def decode(self, ids): return bytes(array.array("I", ids).tolist()).decode()
)";

class PreprocessData : public ::testing::Test {
protected:
    void SetUp() override {
        folder_.write("python/tokenizers.py", kTokenizers);
        folder_.write("model/tokenizer.json", "{}");
        folder_.write("model/tokenizer_config.json", R"({"eos_token": {"content": "<end>"}})");
        folder_.write("text/a.txt", std::string(3000, 'a'));
        folder_.write("text/b.txt", "b\xff");
        std::string lines;
        for (int i = 0; i < 3; ++i) lines += R"({"text": ")" + std::string(3 << 20, 'c') + "\"}\n";
        folder_.write("text/c.jsonl", lines);
    }
    CommandResult run(const std::string& arguments) const {
        return RunningCommand({"bash", "-c", "PYTHONPATH=python " + arguments}, folder_.path()).wait(120);
    }
    CommandResult preprocess(const std::string& arguments, const std::string& environment = "") const {
        return run(environment + " python3 " FP8FLOW_SOURCE_DIR "/scripts/preprocess_data.py " + arguments);
    }
    void refuse(const std::string& arguments, const std::string& reason) const {
        const std::string result = failure(2, preprocess(arguments));
        expect_contains(result, reason);
    }

    TemporaryFolder folder_;
};

TEST_F(PreprocessData, TrainingReadsIt) {
    const CommandResult result = succeeded(preprocess("model text --out data/my"));
    const int64_t tokens = 3001 + 3 * ((3 << 20) + 1);
    expect_contains(result.out, "4 documents, " + std::to_string(tokens) +
                                    " tokens of 16 bits, vocabulary of 257; 1 files left out");
    expect_contains(result.err, "left out: text/b.txt: not UTF-8 from byte 1 on");
    EXPECT_EQ(std::filesystem::file_size(folder_.path("data/my.bin")), 2 * static_cast<uintmax_t>(tokens));
    EXPECT_FALSE(std::filesystem::exists(folder_.path("data/my.lengths")));
    const auto train = [&](const std::string& vocab_size) {
        return fp8flow_alone(with_settings({"train", config_file("test"), "--backend", "reference", "--out",
                                            "run", "--overwrite"},
                                           {"training.train_iters=1", "data.data_kind=megatron",
                                            "data.data_path=[data/my]", "model.vocab_size=" + vocab_size}),
                             folder_.path());
    };
    expect_contains(succeeded(train("512")).out, "4 documents");
    expect_contains(failure(ExitCode::data, train("256")), "the tokenizer has 257 tokens, the model 256");
}

TEST_F(PreprocessData, GoesOnWhereItWasInterrupted) {
    ASSERT_EQ(preprocess("model text --out whole").status, 0);
    ASSERT_EQ(preprocess("model text --out parts", "STOP_AFTER=3").status, 9);
    EXPECT_FALSE(std::filesystem::exists(folder_.path("parts.idx")));
    const CommandResult rest = succeeded(preprocess("model text --out parts"));
    expect_contains(rest.err, "goes on after");
    for (const char* ending : {".bin", ".idx", ".json"})
        EXPECT_TRUE(read_whole(folder_.path("whole") + ending) == read_whole(folder_.path("parts") + ending))
            << ending;
    expect_contains(preprocess("model text --out parts").out, "finished, 4 documents");
    refuse("model text/a.txt --out parts", "--overwrite replaces them");
    const auto written = std::filesystem::last_write_time(folder_.path("parts.json"));
    folder_.write("text/a.txt", std::string(3000, 'A'));  // as long as before
    std::filesystem::last_write_time(folder_.path("text/a.txt"), written + std::chrono::seconds(1));
    refuse("model text --out parts", "text/a.txt: was written after parts.json");
    std::filesystem::last_write_time(folder_.path("text/a.txt"), written);
    std::filesystem::resize_file(folder_.path("parts.bin"), 100);  // zeros would take their place
    refuse("model text --out parts", "parts.bin: has less than parts.json counts; --overwrite makes");
    EXPECT_EQ(preprocess("model text --out parts --overwrite").status, 0);
    std::filesystem::remove(folder_.path("parts.idx"));
    refuse("model text --out parts", "parts.lengths: has less than");
    EXPECT_EQ(preprocess("model text/a.txt --out parts --overwrite").status, 0);
}

TEST_F(PreprocessData, TokensOfATextAndBack) {
    const std::string script = "python3 " FP8FLOW_SOURCE_DIR "/scripts/tokens.py ";
    EXPECT_EQ(run(script + "encode model 'a b'").out, "97,32,98\n");
    EXPECT_EQ(run("printf 'warning: x\\n104,105\\n' | PYTHONPATH=python " + script + "decode model").out,
              "hi\n");
    for (const std::string ids : {"1,x", "1,-2"})
        expect_contains(failure(2, run(script + "decode model " + ids)),
                        "tokens.py: '" + ids + "' is no list of token ids");
    expect_contains(failure(2, run("printf 'a\377' | PYTHONPATH=python " + script + "encode model")),
                    "tokens.py: the text is not UTF-8");
}

TEST_F(PreprocessData, Refuses) {
    folder_.write("bad.jsonl", "{\"text\": \"a\"}\n{\"body\": \"b\"}\n");
    refuse("model bad.jsonl --out out",
           "bad.jsonl: the line that ends at byte 28 is no JSON object with a string under 'text'");
    folder_.write("half.jsonl", R"({"text": "\ud800"})");
    refuse("model half.jsonl --out out", "half.jsonl: the line that ends at byte 18 is no JSON object");
    folder_.write("list.json", "[1]");
    refuse("model text --out list", "list.json: exists, and is not a file of this script");
    refuse("model list.json --out list --overwrite", "--out list would write it: name another --out");
    refuse("model nothing --out out", "nothing: no such file or folder");
    refuse("model text/b.txt --out out", "the files hold no document");
    refuse("nowhere text --out out", "nowhere: no such file; MODEL is");
    refuse("model text --out out --eod nil", "'nil' (--eod) is no token");
    std::filesystem::remove(folder_.path("model/tokenizer_config.json"));
    refuse("model text --out out", "name the token that ends a document with --eod");
}

}  // namespace
}  // namespace fp8flow
