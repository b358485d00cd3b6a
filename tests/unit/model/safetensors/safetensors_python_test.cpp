// SPDX-License-Identifier: MIT
// Round trip with the Python package `safetensors`, the implementation that everybody uses: it reads what we
// write and we read what it writes, every type, scalars and empty tensors. Skipped where python3 or the
// package is missing.
#include "model/safetensors/file.h"
#include "model/safetensors/writer.h"

#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdlib>

namespace fp8flow {
namespace {

constexpr int kNoPackage = 77, kNoInterpreter = 127;

// Exit status of the helper script.
int python(const std::string& action, const std::string& path) {
    const std::string script = FP8FLOW_SOURCE_DIR "/tests/support/safetensors_round_trip.py";
    const int status = std::system(("python3 '" + script + "' " + action + " '" + path + "'").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Tensor {
    TensorDeclaration declaration;
    std::string data;
};

// What the script holds ready, by the same rule.
std::vector<Tensor> tensors() {
    std::vector<Tensor> all;
    size_t index = 0;
    for (const char* dtype : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16",
                              "BF16", "I32", "U32", "F32", "I64", "U64", "F64"})
        for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {3}, {2, 5}, {0}}) {
            const FileDType type = file_dtype_of(dtype).value();
            std::string data(static_cast<size_t>(checked_bytes(type, shape).value()), '\0');
            for (size_t j = 0; j < data.size(); ++j)
                data[j] = static_cast<char>((31 * j + 7 * index + 1) % 256);
            all.push_back({{fmt::format("{}.{}.{}", dtype, shape.size(), index), type, shape}, data});
            ++index;
        }
    return all;
}

#define SKIP_WITHOUT_PACKAGE(status)                          \
    if ((status) == kNoInterpreter || (status) == kNoPackage) \
    GTEST_SKIP() << "python3 with the package safetensors is not here (pip install safetensors)"

TEST(SafetensorsPython, ReadsWhatWeWrite) {
    const TemporaryFolder folder;
    std::vector<TensorDeclaration> declarations;
    for (const Tensor& tensor : tensors()) declarations.push_back(tensor.declaration);
    std::string file;
    SafetensorsWriter writer(declarations, {{"format", "pt"}}, [&](const void* data, size_t bytes) {
        file.append(static_cast<const char*>(data), bytes);
    });
    for (const Tensor& tensor : tensors())
        writer.append(tensor.declaration.name, tensor.data.data(), static_cast<int64_t>(tensor.data.size()));
    writer.finish();
    const int status = python("check", folder.write("ours.safetensors", file));
    SKIP_WITHOUT_PACKAGE(status);
    EXPECT_EQ(status, 0);
}

TEST(SafetensorsPython, WritesWhatWeRead) {
    const TemporaryFolder folder;
    const std::string path = folder.path("theirs.safetensors");
    const int status = python("write", path);
    SKIP_WITHOUT_PACKAGE(status);
    ASSERT_EQ(status, 0);
    const SafetensorsFile file(path);
    EXPECT_EQ(file.header().metadata,
              (std::map<std::string, std::string>{{"format", "pt"}, {"made by", "tests"}}));
    const auto wanted = tensors();
    EXPECT_EQ(file.tensors().size(), wanted.size());
    for (const Tensor& tensor : wanted) {
        const TensorEntry* entry = file.find(tensor.declaration.name);
        ASSERT_NE(entry, nullptr) << tensor.declaration.name;
        EXPECT_EQ(entry->dtype, tensor.declaration.dtype) << tensor.declaration.name;
        EXPECT_EQ(entry->shape, tensor.declaration.shape) << tensor.declaration.name;
        const auto bytes = file.bytes(*entry);
        EXPECT_EQ(std::string(bytes.begin(), bytes.end()), tensor.data) << tensor.declaration.name;
    }
}

}  // namespace
}  // namespace fp8flow
