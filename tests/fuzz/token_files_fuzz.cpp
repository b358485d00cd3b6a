// SPDX-License-Identifier: MIT
// Tokenised data: the first byte says which format, for Megatron's the next two how many bytes are the index
// and the rest is the .bin. A source that opens gives only tokens of the vocabulary.
#include "tests/fuzz/fuzz.h"
#include "tests/support/file_data.h"

#include "model/data/megatron.h"
#include "model/data/shards.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace {

using namespace fp8flow;
using namespace fp8flow::data;

constexpr int64_t kVocabulary = 1000;

// In memory where the machine has such a folder; one for each process, removed at the end.
class Folder {
public:
    Folder() {
        std::string name = std::filesystem::is_directory("/dev/shm") ? "/dev/shm/fp8flow_fuzz_XXXXXX"
                                                                     : "/tmp/fp8flow_fuzz_XXXXXX";
        fuzz::expect(::mkdtemp(name.data()) != nullptr, "no temporary folder");
        path_ = name;
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string write(const char* name, const uint8_t* data, size_t size) const {
        const std::string path = path_ + "/" + name;
        const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        const bool written = file >= 0 && ::write(file, data, size) == static_cast<ssize_t>(size);
        ::close(file);
        fuzz::expect(written, "cannot write the input");
        return path;
    }

private:
    std::string path_;
};

void read_all(const TokenSource& source) {
    std::vector<int32_t> tokens(static_cast<size_t>(source.seq_length()) + 1);
    for (const Split split : {Split::train, Split::held_out}) {
        const int64_t samples = std::min<int64_t>(source.samples_per_epoch(split), 50);
        for (int64_t i = 0; i < samples; ++i) {
            source.sample(split, i, tokens);
            for (const int32_t token : tokens)
                fuzz::expect(token >= 0 && token < kVocabulary, "a token outside");
        }
    }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Folder folder;
    if (size < 3) return 0;
    const uint8_t kind = data[0];
    if (kind % 2 == 0) {
        const std::string path = folder.write("x_train.bin", data + 1, size - 1);
        fuzz::accepts(ExitCode::data, [&] {
            read_all(ShardSource(FileData{.data_path = {path}, .vocab_size = kVocabulary, .seq_length = 8}));
        });
        return 0;
    }
    const size_t rest = size - 3,
                 index = std::min(rest, static_cast<size_t>(data[1]) + 256 * static_cast<size_t>(data[2]));
    const std::string path = folder.write("x.idx", data + 3, index);
    folder.write("x.bin", data + 3 + index, rest - index);
    fuzz::accepts(ExitCode::data, [&] {
        read_all(MegatronSource(FileData{.data_path = {path},
                                         .held_out_fraction = kind % 4 == 1 ? 0.25 : 0.0,
                                         .vocab_size = kVocabulary,
                                         .seq_length = 8}));
    });
    return 0;
}
